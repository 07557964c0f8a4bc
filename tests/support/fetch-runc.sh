#!/bin/sh
# Unpacks a newer runc below a directory, with the libraries that it was built for: pods with user
# namespaces need 1.2 or later. Nothing is installed. Argument: the directory.
set -eu
target=$1
"$target/usr/sbin/runc" --version >/dev/null 2>&1 && exit 0
sh "$(dirname "$0")/fetch-package.sh" sid "runc libc6 libseccomp2" "$target" usr/sbin/runc
libraries=$(dirname "$(find "$PWD/$target" -name libc.so.6)")
loader=$(find "$libraries" -name 'ld-linux*' | head -n 1)
patchelf --set-interpreter "$loader" --set-rpath "$libraries" "$target/usr/sbin/runc"
