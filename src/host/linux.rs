//! The real machine: directories below the root directory, tmpfs mounts, cgroups.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use async_trait::async_trait;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;

use super::Log;
use super::PodHost;
use super::SubPath;
use super::blocking;
use super::cgroups::Cgroups;
use super::serving::rotate;
use crate::core::image::gc::Filesystem;
use crate::core::pod::cgroup::pod_limits;
use crate::core::pod::users::{self, Mappings};
use crate::core::volume::payload::Files;
use crate::core::volume::resolved::ResolvedVolume;
use crate::core::{
    pod::{self, qos},
    serving::logs,
};
use crate::sys::patient::Patient;
use crate::sys::usage::{self, Usage};
use crate::sys::{file, machine, mount, quota};

/// How long a volume may be counted.
const COUNTING: std::time::Duration = std::time::Duration::from_secs(300);

/// The most that is read of a termination message.
const MESSAGE_LIMIT: u64 = 4096;

/// The largest environment file.
const ENV_FILE_LIMIT: u64 = 64 << 10;

/// The end of a log that may stand in for a message: lines, bytes, and how far back is read.
const LOG_LINES: usize = 80;
const LOG_BYTES: usize = 2048;
const LOG_END: u64 = 64 << 10;

/// The machine.
pub struct LinuxHost {
    /// The root directory, for instance `/var/lib/kubelet`.
    pub root: PathBuf,
    /// The directory of pod logs.
    pub logs: PathBuf,
    /// The cgroups of pods.
    pub cgroups: Cgroups,
    /// The number of processes a pod may have.
    pub pids: Option<i64>,
    /// The period of CPU quotas in microseconds; none where quotas are not enforced.
    pub cpu_period: Option<u64>,
    /// Calls that the kernel may never answer.
    pub patient: Patient,
}

/// A pod's uid as one path segment; anything else is refused.
pub(in crate::host) fn segment(text: &str) -> Result<&str, String> {
    let fine =
        !text.is_empty() && text != "." && text != ".." && !text.contains('/') && text.len() < 256;
    if fine {
        Ok(text)
    } else {
        Err(format!("{text:?} cannot be used as a directory name"))
    }
}

pub(in crate::host) fn doing<E: std::fmt::Display>(
    what: impl std::fmt::Display,
) -> impl FnOnce(E) -> String {
    move |error| format!("{what}: {error}")
}

pub(in crate::host) fn make(path: &Path, mode: u32) -> Result<(), String> {
    fs::DirBuilder::new()
        .recursive(true)
        .mode(mode)
        .create(path)
        .map_err(doing(format!(
            "the directory {} cannot be made",
            path.display()
        )))
}

/// Removes a directory and all in it; a missing one is fine.
pub(in crate::host) fn remove(dir: &Path) -> Result<(), String> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(format!("{} cannot be removed: {error}", dir.display()))
        }
        _ => Ok(()),
    }
}

/// The last `limit` bytes of a file.
fn last_bytes(path: &Path, limit: u64) -> Result<String, String> {
    use std::io::{Read as _, Seek as _};
    let mut file = fs::File::open(path).map_err(|e| e.to_string())?;
    let length = file.metadata().map_err(|e| e.to_string())?.len();
    file.seek(io::SeekFrom::Start(length.saturating_sub(limit)))
        .map_err(|e| e.to_string())?;
    let mut bytes = Vec::new();
    file.take(limit)
        .read_to_end(&mut bytes)
        .map_err(|e| e.to_string())?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

impl LinuxHost {
    pub(in crate::host) fn pod_dir(&self, uid: &str) -> Result<PathBuf, String> {
        Ok(self.root.join("pods").join(segment(uid)?))
    }

    fn message_file(&self, uid: &str, container: &str, attempt: u32) -> Result<PathBuf, String> {
        Ok(self
            .pod_dir(uid)?
            .join("containers")
            .join(segment(container)?)
            .join(format!("{attempt:08x}")))
    }

    /// Where log collectors look: `containers` beside the directory of pod logs, as `/var/log/containers`
    /// is beside `/var/log/pods`.
    fn log_links(&self) -> PathBuf {
        self.logs.with_file_name("containers")
    }

    fn log_path(&self, log: &Log) -> Result<PathBuf, String> {
        let dir = format!("{}_{}_{}", log.namespace, log.pod, log.uid);
        Ok(self
            .logs
            .join(segment(&dir)?)
            .join(segment(&log.container)?)
            .join(format!("{}.log", log.attempt)))
    }
}

#[async_trait]
impl PodHost for LinuxHost {
    async fn ensure_cgroup(&self, pod: &Pod) -> Result<String, String> {
        self.cgroups
            .ensure(
                qos::of(pod::spec(pod)),
                pod::uid(pod),
                pod_limits(pod, self.pids, self.cpu_period),
            )
            .await
    }

    fn cgroup_of_all(&self) -> String {
        self.cgroups.place_of_all()
    }

    fn cgroup_path(&self, pod: &Pod, container: Option<&str>) -> String {
        self.cgroups
            .place(qos::of(pod::spec(pod)), pod::uid(pod), container)
    }

    async fn user_mappings(&self, pod: &Pod) -> Result<Mappings, String> {
        let (pods, dir) = (self.root.join("pods"), self.pod_dir(pod::uid(pod))?);
        blocking(move || {
            // One at a time: two pods must not take the same range.
            static TAKING: std::sync::Mutex<()> = std::sync::Mutex::new(());
            let _taking = TAKING
                .lock()
                .unwrap_or_else(std::sync::PoisonError::into_inner);
            let read = |dir: &Path| {
                fs::read(dir.join("userns"))
                    .ok()
                    .and_then(|text| serde_json::from_slice::<Mappings>(&text).ok())
            };
            if let Some(own) = read(&dir) {
                return Ok(own);
            }
            let taken: Vec<Mappings> = fs::read_dir(&pods)
                .into_iter()
                .flatten()
                .filter_map(Result::ok)
                .filter_map(|e| read(&e.path()))
                .collect();
            let free =
                users::free(&taken).ok_or("all ranges of user ids are taken by other pods")?;
            make(&dir, 0o750)?;
            let text = serde_json::to_vec(&free).map_err(|e| e.to_string())?;
            file::replace(&dir.join("userns"), &text)
                .map_err(doing("the pod's user ids cannot be noted"))?;
            Ok(free)
        })
        .await
    }

    async fn make_directories(&self, pod: &Pod) -> Result<(), String> {
        let dir = self.pod_dir(pod::uid(pod))?;
        let logs = self.log_directory(pod);
        blocking(move || {
            for below in ["volumes", "plugins", "containers"] {
                make(&dir.join(below), 0o750)?;
            }
            make(&logs, 0o755)
        })
        .await
    }

    async fn set_up_volume(
        &self,
        pod: &Pod,
        resolved: &ResolvedVolume,
        files: Option<Files>,
    ) -> Result<(), String> {
        self.set_up(pod::uid(pod), resolved, pod::ownership(pod), files)
            .await
    }

    async fn mount_source(
        &self,
        pod: &Pod,
        resolved: &ResolvedVolume,
        place: &SubPath,
    ) -> Result<PathBuf, String> {
        self.source(pod::uid(pod), resolved, place).await
    }

    async fn read_file(
        &self,
        pod: &Pod,
        resolved: &ResolvedVolume,
        path: &str,
    ) -> Result<String, String> {
        self.read(pod::uid(pod), resolved, path, ENV_FILE_LIMIT)
            .await
    }

    async fn write_hosts(&self, pod: &Pod, text: String) -> Result<PathBuf, String> {
        let path = self.pod_dir(pod::uid(pod))?.join("etc-hosts");
        blocking(move || {
            fs::write(&path, text)
                .map_err(doing(format!("{} cannot be written", path.display())))?;
            fs::set_permissions(&path, fs::Permissions::from_mode(0o644))
                .map_err(doing("the mode of etc-hosts cannot be set"))?;
            Ok(path)
        })
        .await
    }

    async fn termination_log(
        &self,
        pod: &Pod,
        container: &str,
        attempt: u32,
    ) -> Result<PathBuf, String> {
        let path = self.message_file(pod::uid(pod), container, attempt)?;
        blocking(move || {
            if let Some(parent) = path.parent() {
                make(parent, 0o750)?;
            }
            fs::write(&path, "").map_err(doing(format!("{} cannot be written", path.display())))?;
            fs::set_permissions(&path, fs::Permissions::from_mode(0o666))
                .map_err(doing("the mode of the termination log cannot be set"))?;
            Ok(path)
        })
        .await
    }

    async fn termination_message(
        &self,
        uid: &str,
        container: &str,
        attempt: u32,
    ) -> Option<String> {
        let path = self.message_file(uid, container, attempt).ok()?;
        blocking(move || last_bytes(&path, MESSAGE_LIMIT))
            .await
            .ok()
            .filter(|text| !text.is_empty())
    }

    async fn log_tail(&self, pod: &Pod, container: &str, attempt: u32) -> Option<String> {
        let path = self
            .log_directory(pod)
            .join(segment(container).ok()?)
            .join(format!("{attempt}.log"));
        let text = blocking(move || last_bytes(&path, LOG_END)).await.ok()?;
        Some(logs::tail(&text, LOG_LINES, LOG_BYTES)).filter(|text| !text.is_empty())
    }

    async fn last_attempt(&self, pod: &Pod, container: &str) -> Option<u32> {
        let dir = self.log_directory(pod).join(segment(container).ok()?);
        let number = |name: &str| {
            name.split_once(".log")
                .and_then(|(number, _)| number.parse().ok())
        };
        let highest = move || {
            let entries = fs::read_dir(dir)
                .into_iter()
                .flatten()
                .filter_map(Result::ok);
            Ok(entries
                .filter_map(|e| e.file_name().to_str().and_then(number))
                .max())
        };
        blocking(highest).await.ok().flatten()
    }

    async fn link_log(
        &self,
        pod: &Pod,
        container: &str,
        attempt: u32,
        id: &str,
    ) -> Result<(), String> {
        let target = self
            .log_directory(pod)
            .join(segment(container)?)
            .join(format!("{attempt}.log"));
        let links = self.log_links();
        let link = links.join(segment(&logs::link_name(
            &pod.name_any(),
            &pod.namespace().unwrap_or_default(),
            container,
            id,
        ))?);
        blocking(move || {
            make(&links, 0o755)?;
            match std::os::unix::fs::symlink(target, &link) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                    Err(format!("{} cannot be made: {error}", link.display()))
                }
                _ => Ok(()),
            }
        })
        .await
    }

    async fn remove_instance(
        &self,
        pod: &Pod,
        container: &str,
        attempt: u32,
        id: &str,
    ) -> Result<(), String> {
        let dir = self.log_directory(pod).join(segment(container)?);
        let link = self.log_links().join(segment(&logs::link_name(
            &pod.name_any(),
            &pod.namespace().unwrap_or_default(),
            container,
            id,
        ))?);
        let message = self.message_file(pod::uid(pod), container, attempt)?;
        blocking(move || {
            let prefix = format!("{attempt}.log");
            let named = |e: &fs::DirEntry| {
                e.file_name()
                    .to_str()
                    .is_some_and(|n| n == prefix || n.starts_with(&format!("{prefix}.")))
            };
            let logs = fs::read_dir(dir)
                .into_iter()
                .flatten()
                .filter_map(Result::ok)
                .filter(named)
                .map(|e| e.path());
            for file in logs.chain([link, message]) {
                match fs::remove_file(&file) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => {
                        return Err(format!("{} cannot be removed: {error}", file.display()));
                    }
                    _ => {}
                }
            }
            Ok(())
        })
        .await
    }

    async fn log_exceeds(&self, log: &Log, most: u64) -> Option<bool> {
        let path = self.log_path(log).ok()?;
        blocking(move || {
            fs::metadata(path)
                .map(|m| m.len() > most)
                .map_err(|e| e.to_string())
        })
        .await
        .ok()
    }

    async fn move_log_aside(
        &self,
        log: &Log,
        files: usize,
        stamp: &str,
    ) -> Result<PathBuf, String> {
        let (path, stamp) = (self.log_path(log)?, stamp.to_owned());
        blocking(move || {
            rotate::aside(&path, files, &stamp).map_err(doing(format!(
                "the log {} cannot be rotated",
                path.display()
            )))
        })
        .await
    }

    async fn put_log_back(&self, log: &Log, aside: PathBuf) -> Result<(), String> {
        let path = self.log_path(log)?;
        blocking(move || {
            fs::rename(aside, &path).map_err(doing(format!(
                "the log {} cannot be put back",
                path.display()
            )))
        })
        .await
    }

    async fn volume_usage(&self, pod: &Pod, volume: &str, enough: u64) -> Result<Usage, String> {
        let volumes = self.pod_dir(pod::uid(pod))?.join("volumes");
        let name = segment(volume)?.to_owned();
        let places = [
            "kubernetes.io~empty-dir",
            "kubernetes.io~configmap",
            "kubernetes.io~downward-api",
        ]
        .map(|plugin| volumes.join(plugin).join(&name));
        let count = move || {
            places.iter().try_fold(Usage::default(), |all, place| {
                let counted = quota::used(place)
                    .and_then(|known| known.map_or_else(|| usage::of(place, enough), Ok));
                let own = counted.map_err(doing(place.display()))?;
                Ok(Usage {
                    bytes: all.bytes + own.bytes,
                    inodes: all.inodes + own.inodes,
                })
            })
        };
        self.patient
            .call(
                &format!("{}/{volume}/usage", pod::uid(pod)),
                COUNTING,
                count,
            )
            .await
    }

    async fn log_usage(&self, pod: &Pod, container: &str) -> Result<u64, String> {
        let dir = self.log_directory(pod).join(segment(container)?);
        blocking(move || {
            usage::of(&dir, u64::MAX)
                .map(|u| u.bytes)
                .map_err(doing(dir.display()))
        })
        .await
    }

    async fn filesystem(&self, dir: &Path) -> Result<Filesystem, String> {
        let dir = dir.to_owned();
        blocking(move || {
            machine::filesystem(&dir)
                .map_err(|e| format!("the filesystem of {} cannot be read: {e}", dir.display()))
        })
        .await
    }

    async fn tear_down_volumes(&self, uid: &str) -> Result<(), String> {
        self.tear_down(uid).await
    }

    async fn remove_cgroup(&self, pod: &Pod) -> Result<(), String> {
        self.cgroups
            .remove(qos::of(pod::spec(pod)), pod::uid(pod))
            .await
    }

    async fn remove_directories(&self, pod: &Pod) -> Result<(), String> {
        let (dir, logs, links) = (
            self.pod_dir(pod::uid(pod))?,
            self.log_directory(pod),
            self.log_links(),
        );
        blocking(move || {
            remove_unmounted(&dir)?;
            remove_links(&links, &logs)?;
            remove(&logs)
        })
        .await
    }

    fn log_directory(&self, pod: &Pod) -> PathBuf {
        self.logs.join(format!(
            "{}_{}_{}",
            pod.namespace().unwrap_or_default(),
            pod.name_any(),
            pod::uid(pod)
        ))
    }

    async fn node_hosts(&self) -> String {
        tokio::fs::read_to_string("/etc/hosts")
            .await
            .unwrap_or_default()
    }

    async fn leftovers(&self) -> Vec<String> {
        let (pods, memory) = (self.root.join("pods"), self.memory());
        let found = blocking(move || {
            let list = |dir: PathBuf| {
                fs::read_dir(dir)
                    .into_iter()
                    .flatten()
                    .filter_map(Result::ok)
                    .filter_map(|e| e.file_name().into_string().ok())
            };
            Ok(list(pods).chain(list(memory)).collect::<Vec<String>>())
        });
        let mut uids = found.await.unwrap_or_default();
        uids.extend(
            self.cgroups
                .pods()
                .await
                .unwrap_or_default()
                .into_iter()
                .map(|(_, uid)| uid),
        );
        uids.sort();
        uids.dedup();
        uids
    }

    async fn remove_leftovers(&self, uid: &str) -> Result<(), String> {
        self.tear_down(uid).await?;
        let dir = self.pod_dir(uid)?;
        for (class, _) in self
            .cgroups
            .pods()
            .await?
            .into_iter()
            .filter(|(_, known)| known == uid)
        {
            self.cgroups.remove(class, uid).await?;
        }
        let (uid, logs, links) = (uid.to_owned(), self.logs.clone(), self.log_links());
        blocking(move || {
            remove_unmounted(&dir)?;
            for entry in fs::read_dir(&logs)
                .into_iter()
                .flatten()
                .filter_map(Result::ok)
            {
                if entry
                    .file_name()
                    .to_str()
                    .is_some_and(|n| n.ends_with(&format!("_{uid}")))
                {
                    remove_links(&links, &entry.path())?;
                    remove(&entry.path())?;
                }
            }
            Ok(())
        })
        .await
    }
}

/// Removes the links that point below `logs`.
fn remove_links(links: &Path, logs: &Path) -> Result<(), String> {
    for entry in fs::read_dir(links)
        .into_iter()
        .flatten()
        .filter_map(Result::ok)
    {
        if fs::read_link(entry.path()).is_ok_and(|target| target.starts_with(logs)) {
            fs::remove_file(entry.path()).map_err(doing(format!(
                "{} cannot be removed",
                entry.path().display()
            )))?;
        }
    }
    Ok(())
}

/// Removes a directory unless something is still mounted below it.
fn remove_unmounted(dir: &Path) -> Result<(), String> {
    let mounted = mount::below(dir).map_err(|e| e.to_string())?;
    if let Some(point) = mounted.first() {
        return Err(format!(
            "{} is still mounted; {} is kept",
            point.display(),
            dir.display()
        ));
    }
    remove(dir)
}
