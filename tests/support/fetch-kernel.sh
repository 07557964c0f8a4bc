#!/bin/sh
# Unpacks the distribution's kernel for virtual machines below a directory, without installing it. Argument: directory.
set -eu
target=$1
[ -e "$target/boot" ] && exit 0
package=$(apt-cache depends linux-image-cloud-amd64 | sed -n 's/.*Depends: \(linux-image-[^ ]*\).*/\1/p' | head -n 1)
[ -n "$package" ] || { echo "apt has no package linux-image-cloud-amd64; run apt-get update" >&2; exit 1; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
(cd "$work" && apt-get -qq -o APT::Sandbox::User=root download "$package")
# Unpack elsewhere and move the kernel last, so that an interrupted run does not count as complete.
dpkg-deb -x "$work"/*.deb "$work/unpacked"
mkdir -p "$target"
for part in lib usr boot; do
    rm -rf "${target:?}/$part"
    if [ -e "$work/unpacked/$part" ]; then mv "$work/unpacked/$part" "$target/"; fi
done
