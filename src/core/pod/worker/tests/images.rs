//! The images that containers start with.

use super::*;

/// The image is changed after it was pulled and before the sandbox exists: the container does not start with the old
/// image.
#[test]
fn an_image_changed_before_the_start_is_pulled() {
    let spec = |image: &str| json!({"containers": [{"name": "c", "image": image}, {"name": "d", "image": "i"}]});
    let mut run = Run::new(a_pod(spec("i"), json!({})));
    run.settle_but(|op| matches!(op, Op::Sandbox { .. }));
    let pulls = |run: &Run| ["c", "d"].map(|name| run.count(&Key::Pull(name.into())));
    assert_eq!(pulls(&run), [1, 1]);
    let metadata = json!({"generation": 2, "resourceVersion": "2"});
    run.input(Input::Update(a_pod(spec("j"), metadata)));
    run.settle_but(|op| matches!(op, Op::Start { .. }));
    assert_eq!(
        pulls(&run),
        [2, 1],
        "only the changed image is pulled again"
    );
    let starts = |op: &Op| matches!(op, Op::Start { start, .. } if start.container.image.as_deref() == Some("j"));
    assert!(run.waiting.iter().any(starts), "{:?}", run.waiting);
}
