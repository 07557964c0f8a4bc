#!/bin/sh
# Unpacks packages of a newer Debian suite below a directory, without installing anything. The archive
# is the one in this machine's own apt sources. Arguments: suite, packages, directory, a file in it
# whose presence means that it is complete.
set -eu
suite=$1
packages=$2
target=$3
[ -x "$target/$4" ] && exit 0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/etc" "$work/debs" "$work/cache/archives/partial"
uri=$(cat /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list 2>/dev/null | sed -nE 's/^URIs: *([^ ]+).*/\1/p; s/^deb +(\[[^]]*\] +)?([^ ]+) .*/\2/p' | grep -v security | head -n 1)
[ -n "$uri" ] || { echo "apt's sources list no Debian archive; add one to /etc/apt/sources.list" >&2; exit 1; }
key=/usr/share/keyrings/debian-archive-keyring.gpg
echo "deb [signed-by=$key] $uri $suite main" >"$work/etc/sources.list"
# Ignore the packages that are installed on this machine.
apt="apt-get -qq -o Dir::Etc::sourcelist=$work/etc/sources.list -o Dir::Etc::sourceparts=/dev/null -o Dir::State::lists=$work/lists -o Dir::State::status=/dev/null -o Dir::Cache=$work/cache -o APT::Sandbox::User=root"
$apt update
# shellcheck disable=SC2086 # They are words.
(cd "$work/debs" && $apt download $packages)
# Unpack elsewhere and move the complete directory, so that an interrupted run does not count as complete.
rm -rf "$target.new" "$target"
mkdir -p "$target.new"
for deb in "$work"/debs/*.deb; do dpkg-deb -x "$deb" "$target.new"; done
mv "$target.new" "$target"
