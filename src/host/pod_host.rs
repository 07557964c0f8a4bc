//! What the agent does with a pod on this machine: the trait [`PodHost`] for the host of a Linux machine.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;

use super::linux::{LinuxHost, make, remove, segment};
use super::serving::rotate::LogPlace;
use super::volume::Content;
use super::volume::csi::{CsiDirs, Published};
use super::{HostError, Log, OnRemoval, PodHost, SubPath, blocking};
use holdfast_core::image::gc::Filesystem;
use holdfast_core::lock::lock;
use holdfast_core::node::cgroup_tree::Group;
use holdfast_core::pod::Ownership;
use holdfast_core::pod::cgroup::pod_values;
use holdfast_core::pod::cgroup_values::{Difference, RestoredCgroup, Values};
use holdfast_core::pod::memory_qos;
use holdfast_core::pod::observed;
use holdfast_core::pod::users::Mappings;
use holdfast_core::volume::nested;
use holdfast_core::volume::payload::Files;
use holdfast_core::volume::resolved::{Problem, ResolvedVolume};
use holdfast_core::{
    pod::{self, qos},
    serving::logs,
};
use holdfast_sys::beneath::Dir;
use holdfast_sys::failure::doing;
use holdfast_sys::usage::{self, Usage};
use holdfast_sys::{cgroup, file, machine, mount, quota};

/// Time limit for measuring the usage of a volume.
const COUNTING: Duration = Duration::from_secs(300);

/// The size limit of a termination message in bytes.
const MESSAGE_LIMIT: u64 = 4096;

/// The size limit of an environment file in bytes.
const ENV_FILE_LIMIT: u64 = 64 << 10;

/// Limits of the log tail that can replace a termination message: lines, bytes, and bytes read from the file.
const LOG_LINES: usize = 80;
const LOG_BYTES: usize = 2048;
const LOG_END: u64 = 64 << 10;

/// The file name of the termination message of a container instance.
fn message_name(attempt: u32) -> String {
    format!("{attempt:08x}")
}

/// The last `limit` bytes of a file.
fn last_bytes(mut file: fs::File, limit: u64) -> io::Result<String> {
    use std::io::{Read as _, Seek as _};
    let length = file.metadata()?.len();
    file.seek(io::SeekFrom::Start(length.saturating_sub(limit)))?;
    let mut bytes = Vec::new();
    file.take(limit).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

impl LinuxHost {
    /// The directory of a container's termination messages.
    fn messages(&self, uid: &str, container: &str) -> Result<PathBuf, HostError> {
        let of_all = self.pod_dir(uid)?.join("containers");
        Ok(of_all.join(segment(container)?))
    }

    /// The file of a termination message, which the agent creates.
    fn message_file(&self, uid: &str, container: &str, attempt: u32) -> Result<PathBuf, HostError> {
        Ok(self.messages(uid, container)?.join(message_name(attempt)))
    }

    /// The directory that log collectors read: `containers` next to the directory
    /// of pod logs, like `/var/log/containers` next to `/var/log/pods`.
    fn log_links(&self) -> PathBuf {
        self.logs.with_file_name("containers")
    }

    /// The directory of a container's logs.
    fn log_place(&self, of_pod: &Path, container: &str) -> Result<LogPlace, HostError> {
        let pod = of_pod.file_name().unwrap_or_default();
        Ok(LogPlace {
            logs: self.logs.clone(),
            dir: Path::new(pod).join(segment(container)?),
        })
    }

    fn log_file(&self, log: &Log) -> Result<(LogPlace, String), HostError> {
        let dir = format!("{}_{}_{}", log.namespace, log.pod, log.uid);
        let place = self.log_place(Path::new(segment(&dir)?), &log.container)?;
        Ok((place, format!("{}.log", log.attempt)))
    }
}

#[async_trait]
impl PodHost for LinuxHost {
    async fn ensure_cgroup(&self, pod: &Pod, cpu_limit: bool) -> Result<String, HostError> {
        let period = self.cpu_period.filter(|_| cpu_limit);
        let mut values = pod_values(pod, self.pids, period, self.cgroups.page_sizes());
        if self.reserves_memory {
            let protected = memory_qos::of_whole_pod(pod);
            values.memory_min = Some(protected.min);
            values.memory_low = Some(protected.low);
        }
        let class = qos::of(pod::spec(pod));
        self.cgroups.ensure(class, pod::uid(pod), &values).await
    }

    fn cgroup_parent(&self, pod: &Pod) -> String {
        self.cgroups.parent(qos::of(pod::spec(pod)), pod::uid(pod))
    }

    fn memory_of_pod(&self, pod: &Pod) -> Option<u64> {
        let class = qos::of(pod::spec(pod));
        self.cgroups.memory_in_use(class, pod::uid(pod))
    }

    async fn apply_tree(
        &self,
        tree: &[(Group, Values)],
    ) -> Vec<Result<Vec<Difference>, HostError>> {
        self.cgroups.apply(tree).await
    }

    async fn restore_cgroups(&self) -> Vec<RestoredCgroup> {
        self.cgroups.wait_and_restore().await
    }

    fn cgroup_of_all(&self) -> String {
        self.cgroups.path_of_all_pods()
    }

    fn cgroups_of_classes(&self) -> Vec<String> {
        self.cgroups.paths_of_classes()
    }

    fn cgroup_path(&self, pod: &Pod, container: Option<&str>) -> Option<String> {
        self.cgroups
            .place(qos::of(pod::spec(pod)), pod::uid(pod), container)
    }

    async fn user_mappings(&self, pod: &Pod) -> Result<Mappings, HostError> {
        let (pods, dir) = (self.root.join("pods"), self.pod_dir(pod::uid(pod))?);
        let pool = self.users;
        blocking(move || {
            // Serialised, so that two pods cannot get the same range.
            static TAKING: std::sync::Mutex<()> = std::sync::Mutex::new(());
            let _taking = lock(&TAKING);
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
            let free = pool.free(&taken);
            let free = free.ok_or("all ranges of user ids are allocated to other pods")?;
            make(&dir, 0o750)?;
            let text = serde_json::to_vec(&free)?;
            file::replace(&dir.join("userns"), &text)
                .map_err(doing("recording the pod's user ids failed"))?;
            Ok(free)
        })
        .await
    }

    async fn make_directories(&self, pod: &Pod) -> Result<(), HostError> {
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

    async fn group_of_others(&self, pod: &Pod, resolved: &ResolvedVolume) -> Option<u32> {
        let wanted = pod::ownership(pod).group?;
        let found = self.shared_group(pod::uid(pod), resolved).await?;
        Some(found).filter(|found| *found != wanted)
    }

    async fn wait_for_call(&self, uid: &str) {
        self.calls.wait_for_any(&format!("{uid}/")).await;
    }

    async fn grow_volume(&self, pod: &Pod, resolved: &ResolvedVolume) -> Result<(), HostError> {
        self.grow(pod::uid(pod), resolved).await
    }

    async fn set_up_volume(
        &self,
        pod: &Pod,
        resolved: &ResolvedVolume,
        files: Option<Files>,
    ) -> Result<(), Problem> {
        let content = files.map(|files| Content {
            files,
            mounted_within: nested::mount_points_within(pod, &resolved.volume),
        });
        self.set_up(pod::uid(pod), resolved, pod::ownership(pod), content)
            .await
    }

    async fn mount_source(
        &self,
        pod: &Pod,
        resolved: &ResolvedVolume,
        place: &SubPath,
    ) -> Result<PathBuf, HostError> {
        self.source(pod::uid(pod), resolved, place).await
    }

    async fn read_file(
        &self,
        pod: &Pod,
        resolved: &ResolvedVolume,
        path: &str,
    ) -> Result<String, HostError> {
        self.read(pod::uid(pod), resolved, path, ENV_FILE_LIMIT)
            .await
    }

    async fn write_hosts(&self, pod: &Pod, text: String) -> Result<PathBuf, HostError> {
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
    ) -> Result<PathBuf, HostError> {
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
        container: &observed::Container,
    ) -> Option<String> {
        let dir = self.messages(uid, &container.name).ok()?;
        let own = || message_name(container.attempt);
        let name = container.message_file.clone().unwrap_or_else(own);
        let read = move || {
            let file = Dir::open(&dir)?.open_file(Path::new(&name))?;
            last_bytes(file, MESSAGE_LIMIT)
        };
        blocking(move || Ok(read()?))
            .await
            .ok()
            .filter(|text| !text.is_empty())
    }

    async fn log_tail(&self, pod: &Pod, container: &str, attempt: u32) -> Option<String> {
        let place = self.log_place(&self.log_directory(pod), container).ok()?;
        let name = format!("{attempt}.log");
        let read = move || last_bytes(place.open()?.open_log(&name)?, LOG_END);
        let text = blocking(move || Ok(read()?)).await.ok()?;
        Some(logs::tail(&text, LOG_LINES, LOG_BYTES)).filter(|text| !text.is_empty())
    }

    async fn last_attempt(&self, pod: &Pod, container: &str) -> Result<Option<u32>, HostError> {
        let place = self.log_place(&self.log_directory(pod), container)?;
        let number = |name: &String| name.split_once(".log")?.0.parse().ok();
        blocking(move || match place.open().and_then(|dir| dir.names()) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            names => {
                let what = format!("the logs in {} cannot be listed", place.name());
                Ok(names.map_err(doing(what))?.iter().filter_map(number).max())
            }
        })
        .await
    }

    async fn link_log(
        &self,
        pod: &Pod,
        container: &str,
        attempt: u32,
        id: &str,
    ) -> Result<(), HostError> {
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
                    Err(doing(format!("creating {} failed", link.display()))(error))
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
    ) -> Result<(), HostError> {
        let place = self.log_place(&self.log_directory(pod), container)?;
        let link = self.log_links().join(segment(&logs::link_name(
            &pod.name_any(),
            &pod.namespace().unwrap_or_default(),
            container,
            id,
        ))?);
        let message = self.message_file(pod::uid(pod), container, attempt)?;
        blocking(move || {
            let failed = doing(format!("logs of {} cannot be removed", place.name()));
            match place.open() {
                Ok(dir) => dir.remove_attempt(attempt).map_err(failed)?,
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(failed(error)),
            }
            for file in [link, message] {
                match fs::remove_file(&file) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => {
                        return Err(doing(format!("{} cannot be removed", file.display()))(
                            error,
                        ));
                    }
                    _ => {}
                }
            }
            Ok(())
        })
        .await
    }

    async fn log_sizes(&self, logs: &[Log]) -> Vec<Option<u64>> {
        let count = logs.len();
        let files: Vec<_> = logs.iter().map(|log| self.log_file(log).ok()).collect();
        let size = |file: Option<(LogPlace, String)>| {
            let (place, name) = file?;
            Some(
                place
                    .open()
                    .ok()?
                    .open_log(&name)
                    .ok()?
                    .metadata()
                    .ok()?
                    .len(),
            )
        };
        blocking(move || Ok(files.into_iter().map(size).collect()))
            .await
            .unwrap_or_else(|_| vec![None; count])
    }

    async fn rotate_log(&self, log: &Log, files: usize, stamp: &str) -> Result<String, HostError> {
        let ((place, name), stamp) = (self.log_file(log)?, stamp.to_owned());
        blocking(move || {
            let moved = place
                .open()
                .and_then(|dir| dir.move_aside(&name, files, &stamp));
            moved.map_err(doing(format!(
                "the log {name} of {} cannot be rotated",
                place.name()
            )))
        })
        .await
    }

    async fn compress_log(&self, log: &Log) -> Result<(), HostError> {
        let (place, name) = self.log_file(log)?;
        blocking(move || {
            let compressed = place.open().and_then(|dir| dir.compress_older(&name));
            compressed.map_err(doing(format!(
                "the rotated files of the log {name} of {} cannot be compressed",
                place.name()
            )))
        })
        .await
    }

    async fn revert_log_rotation(&self, log: &Log, aside: String) -> Result<(), HostError> {
        let (place, name) = self.log_file(log)?;
        blocking(move || {
            let renamed = place.open().and_then(|dir| dir.put_back(&aside, &name));
            renamed.map_err(doing(format!(
                "the log {name} of {} cannot be put back",
                place.name()
            )))
        })
        .await
    }

    async fn volume_usage(
        &self,
        pod: &Pod,
        volume: &str,
        stop_above: u64,
    ) -> Result<Usage, HostError> {
        let volumes = self.pod_dir(pod::uid(pod))?.join("volumes");
        let name = segment(volume)?.to_owned();
        let places = ["kubernetes.io~empty-dir", "kubernetes.io~configmap"]
            .map(|plugin| volumes.join(plugin).join(&name));
        let count = move || {
            places.iter().try_fold(Usage::default(), |all, place| {
                let counted = quota::used(place)
                    .and_then(|known| known.map_or_else(|| usage::of(place, stop_above), Ok));
                let own = counted.map_err(doing(place.display()))?;
                Ok(Usage {
                    bytes: all.bytes + own.bytes,
                    inodes: all.inodes + own.inodes,
                })
            })
        };
        self.calls
            .call(
                &format!("usage {}/{volume}", pod::uid(pod)),
                COUNTING,
                count,
            )
            .await
    }

    async fn log_usage(&self, pod: &Pod, container: &str) -> Result<u64, HostError> {
        let dir = self.log_directory(pod).join(segment(container)?);
        blocking(move || {
            usage::of(&dir, u64::MAX)
                .map(|u| u.bytes)
                .map_err(doing(dir.display()))
        })
        .await
    }

    async fn filesystem(&self, dir: &Path) -> Result<Filesystem, HostError> {
        let dir = dir.to_owned();
        blocking(move || {
            machine::filesystem(&dir).map_err(doing(format!(
                "the filesystem of {} cannot be read",
                dir.display()
            )))
        })
        .await
    }

    async fn chown_published(&self, volume: &Published, owner: Ownership) -> Result<(), Problem> {
        self.change_ownership(volume, owner).await
    }

    async fn unmount_within(&self, volume: &Published) -> Result<(), HostError> {
        LinuxHost::unmount_within(self, &volume.target).await
    }

    async fn unbind_sub_paths(&self, uid: &str) -> Result<(), HostError> {
        LinuxHost::unbind_sub_paths(self, uid).await
    }

    async fn tear_down_volumes(&self, uid: &str, each: OnRemoval<'_>) -> Result<(), HostError> {
        self.tear_down(uid, each).await
    }

    async fn remove_cgroup(&self, pod: &Pod) -> Result<(), HostError> {
        self.cgroups
            .remove(qos::of(pod::spec(pod)), pod::uid(pod))
            .await
    }

    async fn remove_container_cgroup(&self, pod: &Pod, id: &str) -> Result<(), HostError> {
        let Some(place) = self.cgroup_path(pod, Some(id)) else {
            return Ok(());
        };
        blocking(move || Ok(cgroup::remove(&place)?)).await
    }

    async fn remove_directories(&self, pod: &Pod, keeps_logs: bool) -> Result<(), HostError> {
        let (dir, logs, links) = (
            self.pod_dir(pod::uid(pod))?,
            self.log_directory(pod),
            self.log_links(),
        );
        let logs = if keeps_logs { vec![] } else { vec![logs] };
        blocking(move || remove_pod(&dir, &logs, &links)).await
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
        let pods = self.root.join("pods");
        let found = blocking(move || {
            let listed = fs::read_dir(pods).into_iter().flatten().flatten();
            let names = listed.filter_map(|entry| entry.file_name().into_string().ok());
            Ok(names.collect::<Vec<String>>())
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

    async fn unknown_volumes(&self, uid: &str) -> u64 {
        let (dirs, uid) = (CsiDirs(self.root.clone()), uid.to_owned());
        blocking(move || Ok(dirs.count_of(&uid).1))
            .await
            .unwrap_or_default()
    }

    async fn remove_corrupt_results(&self, sandbox: &str) -> bool {
        super::cni_cache::remove_corrupt(sandbox).await
    }

    async fn remove_leftovers(&self, uid: &str) -> Result<(), HostError> {
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
            let all = fs::read_dir(&logs).into_iter().flatten().flatten();
            let end = format!("_{uid}");
            let is_its = |entry: &fs::DirEntry| {
                let name = entry.file_name();
                name.to_str().is_some_and(|name| name.ends_with(&end))
            };
            let its: Vec<PathBuf> = all.filter(is_its).map(|entry| entry.path()).collect();
            remove_pod(&dir, &its, &links)
        })
        .await
    }
}

/// Removes a pod's directory, its log directories and the links to them, unless there is still a mount below
/// the pod's directory. Removes the pod's directory last: after a crash it shows that the pod needs cleanup.
fn remove_pod(dir: &Path, logs: &[PathBuf], links: &Path) -> Result<(), HostError> {
    check_unmounted(dir)?;
    for logs in logs {
        remove_links(links, logs)?;
        remove(logs)?;
    }
    remove(dir)
}

/// Removes the links that point below `logs`.
fn remove_links(links: &Path, logs: &Path) -> Result<(), HostError> {
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

/// Fails if there is a mount below a directory.
fn check_unmounted(dir: &Path) -> Result<(), HostError> {
    let mounted = mount::below(dir)?;
    if let Some(mount) = mounted.first() {
        return Err(format!(
            "a filesystem is still mounted at {}: unmount it; {} is kept until then",
            mount.point.display(),
            dir.display()
        )
        .into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgroups::Cgroups;
    use holdfast_core::pod::cgroup::Driver;
    use holdfast_core::pod::observed::{Container, ContainerState};

    fn ended(message_file: Option<&str>) -> Container {
        Container {
            id: "id".into(),
            name: "c".into(),
            sandbox: "s".into(),
            attempt: 1,
            state: ContainerState::Exited,
            created_at: jiff::Timestamp::UNIX_EPOCH,
            started_at: None,
            finished_at: None,
            exit_code: 1,
            reason: String::new(),
            message: String::new(),
            image: String::new(),
            image_ref: String::new(),
            hash: None,
            user: None,
            stop_signal: None,
            message_file: message_file.map(Into::into),
        }
    }

    #[tokio::test]
    async fn a_termination_message_is_read_from_the_file_that_the_runtime_reports() {
        let root = tempfile::tempdir().expect("a directory");
        let (cgroups, logs) = (Cgroups::new("/", Driver::Cgroupfs), root.path().join("l"));
        let host = LinuxHost::new(root.path(), logs, cgroups, None, None);
        let dir = root.path().join("pods/u/containers/c");
        fs::create_dir_all(&dir).expect("mkdir");
        fs::write(root.path().join("pods/u/secret"), "others'").expect("a file");
        fs::write(dir.join("1a2b3c4d"), "of the kubelet").expect("a file");
        fs::write(dir.join("00000001"), "own").expect("a file");
        std::os::unix::fs::symlink("../../secret", dir.join("link")).expect("a link");
        for (file, expected) in [
            (Some("1a2b3c4d"), Some("of the kubelet")),
            (None, Some("own")),
            (Some("gone"), None),
            (Some("../../secret"), None),
            (Some("link"), None),
        ] {
            let read = host.termination_message("u", &ended(file)).await;
            assert_eq!(read.as_deref(), expected, "{file:?}");
        }
    }

    #[tokio::test]
    async fn a_pods_directory_is_kept_until_its_logs_are_removed() {
        let root = tempfile::tempdir().expect("a directory");
        let (cgroups, logs) = (Cgroups::new("/", Driver::Cgroupfs), root.path().join("l"));
        let host = LinuxHost::new(root.path(), logs, cgroups, None, None);
        let text = r#"{"metadata": {"namespace": "ns", "name": "p", "uid": "u"}}"#;
        let pod: Pod = serde_json::from_str(text).expect("a pod");
        let (dir, all) = (root.path().join("pods/u"), root.path().join("l"));
        fs::create_dir_all(&dir).expect("mkdir");
        // With a file in place of the log directory, removing the logs fails.
        fs::write(&all, "").expect("a file");
        assert!(host.remove_directories(&pod, false).await.is_err() && dir.exists());
        fs::remove_file(&all).expect("removed");
        let logs = host.log_directory(&pod);
        fs::create_dir_all(&logs).expect("mkdir");
        host.remove_leftovers("u").await.expect("removed");
        assert!(!dir.exists() && !logs.exists());
    }
}
