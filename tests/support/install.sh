#!/bin/sh
# Installs the named packages from the distribution unless they are installed. Arguments: package
# names. Any kubectl on the PATH counts as kubectl.
set -eu

missing=
for package in "$@"; do
    case $package in
        kubectl)
            command -v kubectl >/dev/null || missing="$missing kubernetes-client" ;;
        containerd | runc)
            PATH="$PATH:/usr/sbin:/sbin" command -v "$package" >/dev/null || missing="$missing $package" ;;
        *)
            dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing="$missing $package" ;;
    esac
done
if ! command -v cc >/dev/null; then missing="$missing gcc libc6-dev"; fi
[ -n "$missing" ] || exit 0

if ! command -v apt-get >/dev/null; then
    echo "apt-get is not available; install these packages with this system's package manager:$missing" >&2
    exit 1
fi
echo "installing:$missing"
[ "$(id -u)" = 0 ] || { echo "installing packages needs root; run make with sudo" >&2; exit 1; }
export DEBIAN_FRONTEND=noninteractive
# The package must not start its own containerd: `holdfast up` starts a private one.
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
    printf '#!/bin/sh\nexit 101\n' >$policy
    chmod 755 $policy
    trap 'rm -f $policy' EXIT
fi
apt-get update -qq
# shellcheck disable=SC2086
apt-get install -y -qq --no-install-recommends $missing >/dev/null
# A firewall or a registry that was installed for the tests must not start at boot. Without systemd nothing does.
if command -v systemctl >/dev/null; then
    for service in firewalld docker-registry; do
        case " $missing " in *" $service "*) systemctl disable --quiet "$service" ;; esac
    done
fi
