//! What drivers are asked when they refuse, are busy, publish anew or are replaced, with a real containerd.
#![allow(clippy::unwrap_used)]

#[path = "support/driver.rs"]
mod driver;
mod support;

use driver::Driver;
use support::{Cluster, condition};

const NAME: &str = "errors.test";

fn pod(name: &str, image: &str, mount: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec: {{terminationGracePeriodSeconds: 1, containers: [{{name: c, image: '{image}', command: [busybox, sleep, '10000'], volumeMounts: [{{name: v, mountPath: /v{mount}}}]}}], volumes: [{{name: v, persistentVolumeClaim: {{claimName: v}}}}]}}\n---\n"
    )
}

#[test]
fn drivers_are_asked_for_what_is_needed_and_no_more() {
    let cluster = Cluster::start_configured("csi-errors", 54, "{syncFrequency: 2s}");
    let image = support::busybox(&cluster);
    let dir = tempfile::tempdir().unwrap();
    let registry = cluster.data().join("agent/plugins_registry");
    let ready = |name: &str| condition(&cluster.pod(name), "Ready") == "True";
    cluster.apply(&format!(
        "apiVersion: storage.k8s.io/v1\nkind: CSIDriver\nmetadata: {{name: {NAME}}}\nspec: {{attachRequired: false, requiresRepublish: true}}\n---\napiVersion: v1\nkind: PersistentVolume\nmetadata: {{name: v}}\nspec: {{storageClassName: '', capacity: {{storage: 1Mi}}, accessModes: [ReadWriteOnce], claimRef: {{namespace: default, name: v}}, csi: {{driver: {NAME}, volumeHandle: v-1}}}}\n---\napiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {{name: v}}\nspec: {{storageClassName: '', accessModes: [ReadWriteOnce], resources: {{requests: {{storage: 1Mi}}}}}}\n---\n"
    ));
    let first = Driver::new(NAME, dir.path()).run(&registry);
    let driver = first.driver.clone();
    cluster.wait("the registration", || driver.outcome().is_some());

    // What was refused for good was not done: nothing has to be undone.
    driver.refuse("stage", true);
    cluster.apply(&pod("refused", &image, ""));
    cluster.wait("the refusal to be told", || {
        cluster
            .events("refused")
            .contains("this is refused for good")
    });
    cluster.kubectl(&["delete", "pod", "refused"]);
    assert_eq!(
        (driver.count("publish"), driver.count("unstage")),
        (0, 0),
        "{:?}",
        driver.calls()
    );
    driver.refuse("stage", false);

    // It is published anew time and again, and staged once; parts of it are unmounted before the driver is asked.
    let staged = driver.count("stage");
    cluster.apply(&pod("one", &image, ", subPath: a/b"));
    cluster.wait("the pod", || ready("one"));
    cluster.wait("it to be published anew", || driver.count("publish") > 3);
    assert_eq!(driver.count("stage"), staged + 1, "{:?}", driver.calls());
    cluster.apply(&pod("two", &image, ""));
    cluster.wait("the second pod", || ready("two"));
    assert_eq!(driver.count("stage"), staged + 1, "{:?}", driver.calls());
    cluster.kubectl(&["delete", "pod", "one"]);
    assert_eq!(
        (driver.count("busy"), driver.count("unstage")),
        (0, 0),
        "{:?}",
        driver.calls()
    );

    // A driver that is replaced has two sockets for a while; it stays when the older goes.
    let later = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(registry.join("later")).unwrap();
    let second = Driver::new(NAME, later.path()).run(&registry.join("later"));
    cluster.wait("the second registration", || {
        second.driver.outcome().is_some()
    });
    drop(first);
    let published = second.driver.count("publish");
    cluster.wait("the second to be asked", || {
        second.driver.count("publish") > published
    });
    cluster.kubectl(&["delete", "pod", "two"]);
    assert_eq!(second.driver.count("unstage"), 1);
    assert_eq!(cluster.leftovers(), Vec::<String>::new());
}
