#!/bin/sh
# Creates a disk with a small Debian for virtual machines: systemd, containerd, an NFS server and
# AppArmor, from this machine's own suite and archive. A disk that another version of this script
# created is replaced. Arguments: the directory of its kernel, the disk's file.
set -eu
PATH="$PATH:/usr/sbin:/sbin"
kernel=$1
disk=$2
[ -e "$disk" ] && cmp -s "$0" "$disk.made-by" && exit 0
. /etc/os-release
uri=$(cat /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list 2>/dev/null | sed -nE 's/^URIs: *([^ ]+).*/\1/p; s/^deb +(\[[^]]*\] +)?([^ ]+) .*/\2/p' | grep -v security | head -n 1)
[ -n "$uri" ] || { echo "no Debian archive in apt's sources" >&2; exit 1; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
packages=systemd,systemd-sysv,dbus,udev,kmod,iproute2,nftables,containerd,runc,nfs-kernel-server,nfs-common,open-iscsi,e2fsprogs,apparmor
mmdebstrap --quiet --variant=essential --mode=root --include="$packages" "$VERSION_CODENAME" "$work/root" \
    "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $uri $VERSION_CODENAME main" >"$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }
for modules in "$kernel"/lib/modules/*; do depmod -b "$kernel" "$(basename "$modules")"; done
cp -a "$kernel"/lib/modules "$work/root/lib/"
# Disable services that would interfere. Loading AppArmor profiles takes long on an emulated processor.
for unit in apparmor containerd nfs-server apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer fstrim.timer; do
    rm -f "$work"/root/etc/systemd/system/*.wants/$unit "$work"/root/etc/systemd/system/*.wants/$unit.service
done
: >"$work/root/etc/machine-id"
mkfs.ext4 -q -d "$work/root" "$disk.new" 2G
mv "$disk.new" "$disk"
cp "$0" "$disk.made-by"
