//! Unmounts and removes a pod's volumes (`pkg/volume/util/operationexecutor/operation_generator.go`).
//!
//! The order:
//!
//! - Cancel pending mounts and wait for them.
//! - Unmount the pod's mounts from the deepest up.
//! - Unmount global mounts that no pod uses.
//! - Log out of sessions.
//!
//! The unmount of an unresponsive remote filesystem is forced after a timeout.
//! Busy filesystems and local disks are never forced.

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Instant;

use nix::errno::Errno;
use nix::mount::MntFlags;

use super::KERNEL_TIMEOUT;
use super::staging_lock::StagingLock;
use super::{csi, disks, mapped};
use crate::linux::{LinuxHost, remove, segment};
use crate::{HostError, OnRemoval, VolumeRemoval, blocking};
use holdfast_core::lock::lock;
use holdfast_sys::failure::doing;
use holdfast_sys::mount::{self, Mount};

/// The plugins whose volumes the agent creates, and removes together with their contents.
const AGENT_PLUGINS: [&str; 5] = [
    "kubernetes.io~empty-dir",
    "kubernetes.io~configmap",
    "kubernetes.io~downward-api",
    "kubernetes.io~projected",
    "kubernetes.io~secret",
];
/// The plugin whose volumes are removed by their drivers.
const CSI_PLUGIN: &str = "kubernetes.io~csi";

/// A volume in a pod's directory.
struct Volume {
    /// The directory name of its plugin.
    plugin: String,
    dir: PathBuf,
    /// Whether the volume is a block device.
    block: bool,
}

/// The volumes in a pod's directory, except those of CSI drivers. Does not access mounts, which may hang.
fn places(pod: &Path) -> Vec<Volume> {
    let listed = |dir: &Path| fs::read_dir(dir).into_iter().flatten().flatten();
    let mut found = vec![];
    for (below, block) in [("volumes", false), ("volumeDevices", true)] {
        for plugin in listed(&pod.join(below)) {
            let name = plugin.file_name().to_string_lossy().into_owned();
            if name == CSI_PLUGIN {
                continue;
            }
            found.extend(listed(&plugin.path()).map(|volume| Volume {
                plugin: name.clone(),
                dir: volume.path(),
                block,
            }));
        }
    }
    found
}

/// Whether a filesystem depends on a server or a program that may fail.
fn is_remote(kind: &str) -> bool {
    let kind = kind.split('.').next().unwrap_or(kind);
    kind.starts_with("nfs") || ["cifs", "smb3", "ceph", "9p", "fuse"].contains(&kind)
}

/// Why an unmount did not succeed.
#[derive(Debug)]
enum UnmountError {
    /// The kernel has not answered: it waits for a server or program.
    Pending(HostError),
    /// The kernel has returned this error.
    Failed(PathBuf, Errno),
    /// The call was not made.
    NotAttempted(HostError),
}

impl UnmountError {
    /// Whether the server appears to be lost. A responsive server may still receive unwritten data.
    fn is_server_lost(&self) -> bool {
        match self {
            UnmountError::Pending(_) => true,
            UnmountError::Failed(_, error) => matches!(error, Errno::EIO | Errno::ESTALE),
            UnmountError::NotAttempted(_) => false,
        }
    }
}

impl From<HostError> for UnmountError {
    fn from(error: HostError) -> UnmountError {
        match error.is_under_way() {
            true => UnmountError::Pending(error),
            false => UnmountError::NotAttempted(error),
        }
    }
}

impl From<UnmountError> for HostError {
    fn from(error: UnmountError) -> HostError {
        match error {
            UnmountError::Pending(why) | UnmountError::NotAttempted(why) => why,
            UnmountError::Failed(point, error) => {
                let busy = match error {
                    Errno::EBUSY => {
                        "; files in it are open: the unmount is not forced, because unwritten data would be lost; retrying"
                    }
                    _ => "",
                };
                HostError::failed(format!(
                    "{} cannot be unmounted: {error}{busy}",
                    point.display()
                ))
            }
        }
    }
}

/// Whether the outcome is final. A pending call reports its outcome when it completes.
fn is_final<T>(outcome: &Result<T, HostError>) -> bool {
    !outcome.as_ref().is_err_and(HostError::is_under_way)
}

/// The key of a pending unmount.
fn unmount_key(point: &Path, flags: MntFlags) -> String {
    format!("unmount {} {flags:?}", point.display())
}

impl LinuxHost {
    /// Unmounts a pod's volumes and removes the files that the agent has created. Then unmounts
    /// global mounts that no pod uses: those of this pod, and leftovers of a killed agent.
    pub(crate) async fn tear_down(&self, uid: &str, each: OnRemoval<'_>) -> Result<(), HostError> {
        let failed = || doing("volumes cannot be unmounted");
        self.cancel_setup(uid).await?;
        self.release_mapped(uid).await.map_err(failed())?;
        let dir = self.pod_dir(uid)?;
        let inspect = move || {
            let dir = fs::canonicalize(&dir).unwrap_or(dir);
            let table = mount::table()?;
            Ok((places(&dir), table, csi::recorded_in(&dir), dir))
        };
        let (places, table, recorded, dir) = blocking(inspect).await?;
        let had: BTreeSet<&str> = table
            .iter()
            .filter(|m| m.point.starts_with(&dir))
            .map(|m| m.device.as_str())
            .collect();
        // Concurrently, so that a hanging volume does not block others.
        let work = places.into_iter().map(|place| async {
            let (begun, plugin, block) =
                (Instant::now(), place.plugin.replace('~', "/"), place.block);
            let outcome = self.clean_up(place, &dir, &table).await;
            if is_final(&outcome) {
                each(VolumeRemoval {
                    plugin,
                    block,
                    staged: false,
                    has_failed: outcome.is_err(),
                    took: begun.elapsed(),
                });
            }
            outcome
        });
        for outcome in futures::future::join_all(work).await {
            outcome.map_err(failed())?;
        }
        // Unmount subPath mounts and mounts of other programs, but not what drivers still have to unmount.
        let is_known = |mount: &Mount| recorded.iter().any(|dir| mount.point.starts_with(dir));
        self.unmount_below(&dir, is_known).await.map_err(failed())?;
        self.unstage_idle(&had, each).await.map_err(failed())?;
        self.log_out_unused(uid).await.map_err(failed())
    }

    /// Cancels the pending setup of a pod's volumes and waits for a limited time. A call
    /// that never returns, such as an access to a dead filesystem, must not block pod
    /// termination. A mount that completes later detects the cancellation and undoes itself.
    async fn cancel_setup(&self, uid: &str) -> Result<(), HostError> {
        let begun = format!("{}/", segment(uid)?);
        if let Err(progress) = self.calls.cancel(&begun, KERNEL_TIMEOUT).await {
            tracing::warn!(
                %progress,
                uid,
                "unmounting a pod's volumes although setting up one of them has not finished"
            );
        }
        Ok(())
    }

    /// Unmounts the global mounts that no pod uses. For a device that the pod `had`, failure is an error.
    async fn unstage_idle(
        &self,
        had: &BTreeSet<&str>,
        each: OnRemoval<'_>,
    ) -> Result<(), HostError> {
        let (staging, pods) = (self.staging(), self.root.join("pods"));
        // Read again, because this pod's volumes were unmounted.
        let table = blocking(|| Ok(mount::table()?)).await?;
        let of = |m: &Mount| staging.iter().find(|(_, dir)| m.point.starts_with(dir));
        // Mounts that a kubelet has created for other pods' block devices belong to these pods.
        let staged = table.iter().filter(|m| !mapped::is_mapped(&m.point));
        let staged = staged.filter_map(|m| Some((m, of(m)?.0)));
        for (staged, plugin) in staged {
            if is_in_use(staged, &table, &pods) {
                continue;
            }
            let begun = Instant::now();
            let (key, pods) = (staged.point.display().to_string(), pods.clone());
            let (own, staged) = (had.contains(staged.device.as_str()), staged.clone());
            let work = move || unstage(&pods, &staged);
            let outcome = self.calls.call(&key, KERNEL_TIMEOUT, work).await;
            if outcome != Ok(false) && is_final(&outcome) {
                each(VolumeRemoval {
                    plugin: plugin.into(),
                    block: false,
                    staged: true,
                    has_failed: outcome.is_err(),
                    took: begun.elapsed(),
                });
            }
            match outcome {
                // A hanging device of another pod must not block this one.
                Err(error) if own => return Err(error),
                Err(error) => self.orphans.log(&key, &error),
                Ok(_) => {}
            }
        }
        Ok(())
    }

    /// Removes a volume of the pod with this directory: unmounts it and removes the files that the agent has created.
    async fn clean_up(&self, place: Volume, pod: &Path, table: &[Mount]) -> Result<(), HostError> {
        for mount in mount::among(table, &place.dir) {
            self.unmount(mount).await?;
        }
        let name = place.dir.file_name().unwrap_or_default();
        let mark = pod.join("plugins").join(&place.plugin).join(name);
        blocking(move || {
            if AGENT_PLUGINS.contains(&place.plugin.as_str()) {
                remove(&mark)?;
                return remove(&place.dir);
            }
            let removed = match place.block {
                true => fs::remove_file(&place.dir),
                false => fs::remove_dir(&place.dir),
            };
            match removed.map_err(|e| (e.kind(), e)) {
                // Files below a former mount point do not belong to the agent.
                Ok(()) | Err((ErrorKind::NotFound | ErrorKind::DirectoryNotEmpty, _)) => Ok(()),
                Err((_, error)) => {
                    let what = format!("{} cannot be removed", place.dir.display());
                    Err(doing(what)(error))
                }
            }
        })
        .await
    }

    /// Removes the mounts that a kubelet has created for a pod's block devices.
    async fn release_mapped(&self, uid: &str) -> Result<(), HostError> {
        let (root, own) = (self.root.clone(), segment(uid)?.to_owned());
        let inspect = move || {
            let root = fs::canonicalize(&root).unwrap_or(root);
            let table = mount::table()?;
            Ok(mapped::of_pod(&root, &own, &table))
        };
        for point in blocking(inspect).await? {
            let key = format!("release {}", point.display());
            let work = move || mapped::release(&point);
            self.calls.call(&key, KERNEL_TIMEOUT, work).await?;
        }
        Ok(())
    }

    /// Unmounts subPath mounts and a kubelet's mounts of block devices. Must precede the driver's unpublish call.
    pub(crate) async fn unbind_sub_paths(&self, uid: &str) -> Result<(), HostError> {
        self.cancel_setup(uid).await?;
        self.release_mapped(uid).await?;
        let dir = self.pod_dir(uid)?.join("volume-subpaths");
        self.unmount_below(&dir, |_| false)
            .await
            .map_err(doing("subPath mounts cannot be unmounted"))
    }

    /// Unmounts everything below a directory, but not a mount at the directory itself.
    pub(crate) async fn unmount_within(&self, dir: &Path) -> Result<(), HostError> {
        let (parent, name) = (dir.parent().unwrap_or(dir), dir.file_name());
        let parent = parent.to_owned();
        // Do not access the mount, which may hang.
        let parent = blocking(move || Ok(fs::canonicalize(&parent).unwrap_or(parent))).await?;
        let own = parent.join(name.unwrap_or_default());
        self.unmount_below(dir, |mount| mount.point == own).await
    }

    /// Unmounts everything at or below a directory, from the deepest up, except mounts for which `stays` is true.
    async fn unmount_below(
        &self,
        dir: &Path,
        stays: impl Fn(&Mount) -> bool,
    ) -> Result<(), HostError> {
        let dir = dir.to_owned();
        let mounts = blocking(move || Ok(mount::below(&dir)?)).await?;
        for mount in mounts.into_iter().filter(|mount| !stays(mount)) {
            self.unmount(mount).await?;
        }
        Ok(())
    }

    async fn unmount(&self, mount: Mount) -> Result<(), HostError> {
        let point = mount.point.clone();
        let Err(error) = self.unmount_with(&point, MntFlags::empty()).await else {
            return self.unmounted(&point);
        };
        if !is_remote(&mount.kind) || !error.is_server_lost() {
            // The server has answered: restart the timeout.
            lock(&self.unresponsive).remove(&point);
            return Err(error.into());
        }
        let first = *lock(&self.unresponsive)
            .entry(point.clone())
            .or_insert_with(Instant::now);
        if first.elapsed() < self.force_after {
            return Err(error.into());
        }
        tracing::warn!(
            mount = %point.display(),
            kind = mount.kind,
            why = %HostError::from(error),
            "force-unmounting a network volume whose server does not respond: unwritten data is lost"
        );
        let device = mount.device;
        let shared = blocking(move || {
            let table = mount::table()?;
            Ok(table.iter().filter(|m| m.device == device).count() > 1)
        });
        // Mounts of the same export share a connection; forcing one would fail the calls of all.
        if !shared.await? && self.unmount_with(&point, MntFlags::MNT_FORCE).await.is_ok() {
            return self.unmounted(&point);
        }
        self.unmount_with(&point, MntFlags::MNT_DETACH).await?;
        self.unmounted(&point)
    }

    fn unmounted(&self, point: &Path) -> Result<(), HostError> {
        lock(&self.unresponsive).remove(point);
        Ok(())
    }

    async fn unmount_with(&self, point: &Path, flags: MntFlags) -> Result<(), UnmountError> {
        let (key, own) = (unmount_key(point, flags), point.to_owned());
        let work = move || {
            mount::try_unmount(&own, flags).map_err(|error| UnmountError::Failed(own, error))
        };
        self.calls.call(&key, KERNEL_TIMEOUT, work).await
    }

    /// Logs out of disks that no pod uses: block devices of this
    /// pod, and leftovers of failed setups or of a killed agent.
    async fn log_out_unused(&self, uid: &str) -> Result<(), HostError> {
        let (iscsi, mark) = (
            self.root.join("plugins/kubernetes.io/iscsi"),
            segment(uid)?.to_owned(),
        );
        let found = blocking(move || {
            let mut own = BTreeSet::new();
            for place in disks::places(&iscsi.join("volumeDevices")) {
                if disks::remove_mark(&place.join(&mark))? {
                    own.insert(place);
                }
            }
            Ok(disks::places(&iscsi)
                .into_iter()
                .map(|place| (own.contains(&place), place))
                .collect::<Vec<_>>())
        });
        for (own, place) in found.await? {
            let key = place.display().to_string();
            match self
                .calls
                .call(&key, KERNEL_TIMEOUT, move || {
                    disks::log_out_if_unused(&place)
                })
                .await
            {
                Err(error) if own => return Err(error),
                Err(error) => self.orphans.log(&key, &error),
                Ok(()) => {}
            }
        }
        Ok(())
    }
}

/// Whether a pod has mounted the device of a global mount.
fn is_in_use(staged: &Mount, table: &[Mount], pods: &Path) -> bool {
    let mut of_pods = table.iter().filter(|m| m.point.starts_with(pods));
    of_pods.any(|m| m.device == staged.device)
}

/// Unmounts a global mount if no pod uses it. Returns whether it was unmounted.
fn unstage(pods: &Path, staged: &Mount) -> Result<bool, HostError> {
    // The holder of the lock is about to use the mount, or is unmounting it.
    let Some(_lock) = StagingLock::try_lock(&staged.point) else {
        return Ok(false);
    };
    let table = mount::table()?;
    let there = table.iter().any(|m| m.point == staged.point);
    if !there || is_in_use(staged, &table, pods) {
        return Ok(false);
    }
    // Mounts in other mount namespaces may remain when the session ends, so write the data now.
    if let Err(error) = mount::sync(&staged.point) {
        let point = staged.point.display();
        tracing::warn!(%error, %point, "flushing a volume failed; recently written data may be lost");
    }
    mount::unmount_all(&staged.point)?;
    disks::log_out_if_last(&staged.point)?;
    fs::remove_dir(&staged.point).map_err(doing(format!(
        "{} cannot be removed",
        staged.point.display()
    )))?;
    Ok(true)
}

#[cfg(test)]
pub(super) mod tests {
    use std::time::Duration;

    use super::*;
    use crate::cgroups::Cgroups;
    use crate::linux::FORCE_AFTER;
    use holdfast_core::pod::cgroup::Driver;
    use std::os::fd::AsRawFd as _;
    use std::sync::mpsc::Receiver;

    /// The host with a root directory that is a symlink, as `/var/lib/kubelet` may be.
    pub(in crate::volume) fn host(dir: &Path) -> LinuxHost {
        fs::create_dir_all(dir.join("disk")).expect("mkdir");
        std::os::unix::fs::symlink("disk", dir.join("root")).expect("link");
        LinuxHost::new(
            &dir.join("root"),
            dir.join("logs"),
            Cgroups::new("/", Driver::Cgroupfs),
            None,
            None,
        )
    }

    fn is_busy(error: &HostError) -> bool {
        error.message.contains("EBUSY") && error.message.contains("is not forced")
    }

    /// Blocks until a message arrives.
    fn block_until(until: Receiver<()>) -> Result<(), HostError> {
        until.recv().expect("a message");
        Ok(())
    }

    #[test]
    fn only_an_unresponsive_server_causes_a_forced_unmount() {
        let refused = |error| UnmountError::Failed("/v".into(), error);
        for (error, expected) in [
            (HostError::under_way("no answer"), true),
            // The kernel was not called, so the server's state is unknown.
            (HostError::failed("spawning a thread failed"), false),
            (Errno::ENOENT.into(), false),
        ] {
            let outcome = UnmountError::from(error.clone());
            assert_eq!(outcome.is_server_lost(), expected, "{error}");
            assert_eq!(HostError::from(outcome), error);
        }
        for (error, expected) in [
            (Errno::EIO, true),
            (Errno::ESTALE, true),
            (Errno::EBUSY, false),
            (Errno::EPERM, false),
            (Errno::EAGAIN, false),
        ] {
            assert_eq!(refused(error).is_server_lost(), expected, "{error}");
        }
        assert!(is_busy(&refused(Errno::EBUSY).into()));
    }

    /// A FUSE filesystem that never answers, and the open file that keeps it busy.
    pub(in crate::volume) fn of_a_program(
        point: &Path,
    ) -> Option<(fs::File, std::os::fd::OwnedFd)> {
        fs::create_dir_all(point).expect("mkdir");
        let mut options = fs::OpenOptions::new();
        let answers = options.read(true).write(true).open("/dev/fuse").ok()?;
        let options = format!(
            "fd={},rootmode=40000,user_id=0,group_id=0",
            answers.as_raw_fd()
        );
        nix::mount::mount(
            Some("dead"),
            point,
            Some("fuse"),
            nix::mount::MsFlags::empty(),
            Some(options.as_str()),
        )
        .expect("mounted");
        let flags = nix::fcntl::OFlag::O_PATH;
        let held = nix::fcntl::open(point, flags, nix::sys::stat::Mode::empty());
        Some((answers, held.expect("held")))
    }

    #[tokio::test]
    async fn a_filesystem_without_server_is_force_unmounted_after_a_timeout_and_a_busy_one_never() {
        if crate::skip::needs_root() {
            return;
        }
        let dir = tempfile::tempdir().expect("a directory");
        let mut host = host(dir.path());
        let point = host.root.join("pods/u/volumes/kubernetes.io~nfs/v");
        let Some((_answers, _held)) = of_a_program(&point) else {
            return crate::skip::skipped("this machine has no FUSE");
        };
        let is_mounted = || mount::is_mounted(&point).expect("checked");
        // EBUSY means that the server may be fine: retry, however long that takes.
        host.force_after = Duration::ZERO;
        for _ in 0..2 {
            let busy = host.tear_down("u", &|_| ()).await;
            assert!(busy.is_err_and(|e| is_busy(&e)));
            assert!(is_mounted());
        }
        // Simulates an unmount that waits for a server and does not return.
        let (release, answer) = std::sync::mpsc::channel::<()>();
        let real = fs::canonicalize(dir.path()).expect("a path");
        let real = real.join("disk/pods/u/volumes/kubernetes.io~nfs/v");
        let key = unmount_key(&real, MntFlags::empty());
        let silent = move || block_until(answer);
        let hung = host.calls.call(&key, Duration::from_millis(1), silent);
        assert!(hung.await.is_err(), "the call timed out");
        host.force_after = FORCE_AFTER;
        let failures = std::sync::Mutex::new(vec![]);
        let each = |taken: VolumeRemoval| lock(&failures).push(taken.has_failed);
        let waits = host.tear_down("u", &each).await;
        assert!(waits.is_err_and(|e| e.is_under_way() && e.message.contains("not answered")));
        assert!(is_mounted(), "not before the timeout");
        assert!(lock(&failures).is_empty(), "no result is reported yet");
        host.force_after = Duration::ZERO;
        assert_eq!(host.tear_down("u", &each).await, Ok(()));
        assert!(!is_mounted());
        assert_eq!(*lock(&failures), [false]);
        release.send(()).expect("it waits");
    }

    #[tokio::test]
    async fn a_local_disk_is_never_force_unmounted() {
        if crate::skip::needs_root() {
            return;
        }
        let dir = tempfile::tempdir().expect("a directory");
        let mut host = host(dir.path());
        host.force_after = Duration::ZERO;
        let point = host.root.join("pods/u/volumes/kubernetes.io~empty-dir/v");
        fs::create_dir_all(&point).expect("mkdir");
        mount::tmpfs(&point, 0).expect("mounted");
        let held = fs::File::create(point.join("file")).expect("held");
        for _ in 0..2 {
            let busy = host.tear_down("u", &|_| ()).await;
            assert!(busy.is_err_and(|e| is_busy(&e)));
        }
        drop(held);
        // A program that another test has just forked keeps the file open until its execve.
        let begun = Instant::now();
        let mut outcome = host.tear_down("u", &|_| ()).await;
        while outcome.is_err() && begun.elapsed().as_secs() < 60 {
            outcome = host.tear_down("u", &|_| ()).await;
        }
        assert_eq!(outcome, Ok(()));
    }

    /// A container with a host-root mount has copies of all mounts that existed when
    /// it started. If the session of a disk ends then, unwritten data would be lost.
    #[test]
    fn a_device_is_flushed_before_detaching_even_if_mounted_elsewhere() {
        if crate::skip::needs_root() {
            return;
        }
        let dir = tempfile::tempdir().expect("a directory");
        let (image, point) = (dir.path().join("image"), dir.path().join("mounted"));
        fs::create_dir(&point).expect("mkdir");
        let file = fs::File::create(&image).expect("an image");
        file.set_len(16 << 20).expect("as large");
        let run = |program: &str, arguments: &[&str]| {
            let status = std::process::Command::new(program).args(arguments).status();
            assert!(status.expect("a program").success(), "{program}");
        };
        let [shown, at] = [&image, &point].map(|path| path.display().to_string());
        run("mkfs.ext4", &["-q", "-F", &shown]);
        run("mount", &["-o", "loop", &shown, &at]);
        let mut other = std::process::Command::new("unshare")
            .args(["--mount", "--propagation", "private", "sleep", "600"])
            .spawn()
            .expect("unshare of util-linux");
        let seen = format!("/proc/{}/ns/mnt", other.id());
        let own = fs::read_link("/proc/self/ns/mnt").expect("a namespace");
        let begun = Instant::now();
        while fs::read_link(&seen).expect("a namespace") == own {
            assert!(
                begun.elapsed().as_secs() < 60,
                "the process has a mount namespace"
            );
            std::thread::sleep(Duration::from_millis(10));
        }
        let text = b"this has been written to the volume last";
        fs::write(point.join("file"), text).expect("written");
        let mounts = mount::below(&point).expect("checked");
        let unstaged = unstage(&dir.path().join("pods"), &mounts[0]);
        let there = fs::read(&image).expect("read");
        other.kill().expect("ended");
        other.wait().expect("ended");
        assert_eq!(unstaged, Ok(true));
        assert!(there.windows(text.len()).any(|part| part == text));
    }

    /// Many pods may terminate concurrently, and each searches for unused global mounts. A mount
    /// that another pod uses must be skipped early, so that the searches do not block each other.
    #[tokio::test]
    async fn a_device_used_by_another_pod_does_not_delay_termination() {
        if crate::skip::needs_root() {
            return;
        }
        let dir = tempfile::tempdir().expect("a directory");
        let host = host(dir.path());
        let staged = host
            .root
            .join("plugins/kubernetes.io/local-volume/mounts/pv");
        fs::create_dir_all(&staged).expect("mkdir");
        mount::tmpfs(&staged, 0).expect("mounted");
        for uid in ["u", "w"] {
            let point = host
                .root
                .join("pods")
                .join(uid)
                .join("volumes/kubernetes.io~local-volume/pv");
            fs::create_dir_all(&point).expect("mkdir");
            let status = std::process::Command::new("mount")
                .arg("--bind")
                .args([&staged, &point])
                .status();
            assert!(status.expect("mount").success());
        }
        let iscsi = host.root.join("plugins/kubernetes.io/iscsi");
        let mapped = iscsi.join("volumeDevices/iface-default/10.0.0.1:3260-iqn.x-lun-0/w");
        fs::create_dir_all(mapped.parent().expect("a parent")).expect("mkdir");
        fs::write(&mapped, "").expect("a file");
        let mut bind = std::process::Command::new("mount");
        let bind = bind.args(["--bind", "/dev/null"]).arg(&mapped).status();
        assert!(bind.expect("mount").success());
        let (release, held) = std::sync::mpsc::channel::<()>();
        let hang = move || held.recv().map_err(|e| HostError::failed(e.to_string()));
        let key = staged.display().to_string();
        let staging_call = host.calls.call(&key, Duration::ZERO, hang).await;
        let outcome = host.tear_down("u", &|_| ()).await;
        release.send(()).expect("it waits");
        let are_mounted = [&staged, &mapped].map(|p| mount::is_mounted(p).expect("checked"));
        mount::unmount_all(&host.root).expect("unmounted");
        assert!(staging_call.is_err());
        assert_eq!(are_mounted, [true; 2]);
        assert_eq!(outcome, Ok(()));
    }

    /// A kubelet that ran the pod before has mounted the device over a file and attached a loop
    /// device to it. The loop device keeps the device open, so that no driver could detach it.
    #[tokio::test]
    async fn a_kubelets_mounts_and_loop_devices_are_removed_with_the_pod() {
        if crate::skip::needs_root() {
            return;
        }
        let run = |program: &str, arguments: &[&str]| {
            let output = std::process::Command::new(program).args(arguments).output();
            let output = output.expect("a program");
            assert!(output.status.success(), "{program}: {output:?}");
            String::from_utf8(output.stdout)
                .expect("text")
                .trim()
                .to_owned()
        };
        let dir = tempfile::tempdir().expect("a directory");
        let host = host(dir.path());
        let image = dir.path().join("image");
        let file = fs::File::create(&image).expect("an image");
        file.set_len(1 << 20).expect("as large");
        let device = run("losetup", &["-f", "--show", &image.display().to_string()]);
        let devices = host.root.join("plugins/kubernetes.io/csi/volumeDevices");
        let map = |point: &Path| {
            fs::create_dir_all(point.parent().expect("a parent")).expect("mkdir");
            fs::write(point, "").expect("a file");
            run("mount", &["--bind", &device, &point.display().to_string()]);
        };
        let [own, of_driver] = ["pv/dev/u", "publish/pv/u"].map(|name| devices.join(name));
        map(&own);
        map(&of_driver);
        let held = run("losetup", &["-f", "--show", &own.display().to_string()]);
        let backing = Path::new("/sys/block").join(&held["/dev/".len()..]);
        let begun = Instant::now();
        while !backing.join("loop/backing_file").exists() {
            assert!(begun.elapsed().as_secs() < 60, "it has a file");
        }
        let unbound = host.unbind_sub_paths("u").await;
        let is_mounted = |point: &Path| mount::is_mounted(point).expect("checked");
        let (left, published) = (is_mounted(&own), is_mounted(&of_driver));
        let open = holdfast_sys::loop_device::of(&own).expect("checked");
        for device in [&held, &device] {
            // One loop device is already detached.
            let _ = holdfast_sys::loop_device::detach(Path::new(device));
        }
        mount::unmount_all(&devices).expect("unmounted");
        assert_eq!(unbound, Ok(()));
        assert!(
            !left && published && open.is_empty(),
            "{left} {published} {open:?}"
        );
        assert!(!devices.join("pv/dev").exists());
    }

    /// A driver may be unavailable for long. The pod's other resources
    /// are released, and the driver's mounts stay unchanged.
    #[tokio::test]
    async fn mounts_that_a_driver_must_undo_stay_and_the_rest_is_removed() {
        if crate::skip::needs_root() {
            return;
        }
        let dir = tempfile::tempdir().expect("a directory");
        let host = host(dir.path());
        let dirs = csi::CsiDirs(host.root.clone());
        let data = holdfast_core::volume::csi::VolumeData {
            spec_vol_id: "pv".into(),
            volume_handle: "h".into(),
            driver_name: "d.example".into(),
            ..Default::default()
        };
        let volume = dirs.place("u", data, false, None).expect("a place");
        dirs.prepare(&volume).expect("prepared");
        let volumes = host.root.join("pods/u/volumes");
        let of_others = volumes.join("kubernetes.io~nfs/v");
        let unknown = volumes.join("kubernetes.io~csi/unknown/mount");
        for point in [&volume.target, &of_others, &unknown] {
            fs::create_dir_all(point).expect("mkdir");
            mount::tmpfs(point, 0).expect("mounted");
        }
        let is_mounted = |point: &Path| mount::is_mounted(point).expect("checked");
        assert_eq!(host.tear_down("u", &|_| ()).await, Ok(()));
        assert!(is_mounted(&volume.target));
        assert!(!is_mounted(&of_others) && !is_mounted(&unknown));
        mount::unmount_all(&volume.target).expect("unmounted");
    }

    #[tokio::test]
    async fn teardown_waits_for_a_mount_that_timed_out() {
        if crate::skip::needs_root() {
            return;
        }
        let dir = tempfile::tempdir().expect("a directory");
        let host = host(dir.path());
        let point = host.root.join("pods/u/volumes/kubernetes.io~nfs/v");
        fs::create_dir_all(&point).expect("mkdir");
        let late = point.clone();
        let (release, until) = std::sync::mpsc::channel();
        let mounting = host.calls.call("u/v", Duration::from_millis(20), move || {
            block_until(until)?;
            std::thread::sleep(Duration::from_millis(300));
            mount::tmpfs(&late, 0).map_err(HostError::from)
        });
        assert!(mounting.await.is_err(), "the call timed out");
        release.send(()).expect("it waits");
        assert_eq!(host.tear_down("u", &|_| ()).await, Ok(()));
        assert!(!mount::is_mounted(&point).expect("checked"));
        assert_eq!(host.calls.pending(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_hanging_setup_does_not_block_the_pods_termination() {
        let dir = tempfile::tempdir().expect("a directory");
        let host = host(dir.path());
        fs::create_dir_all(host.root.join("pods/u")).expect("mkdir");
        let (release, until) = std::sync::mpsc::channel();
        let setup = host
            .calls
            .call("u/v", Duration::from_millis(20), move || block_until(until));
        assert!(setup.await.is_err(), "the call timed out");
        assert_eq!(host.tear_down("u", &|_| ()).await, Ok(()));
        release.send(()).expect("it waits");
    }
}
