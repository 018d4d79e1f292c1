#!/usr/bin/env bash
# Run the tests and the demo in a system that differs from this machine.
#
#     sudo test/tools/elsewhere.sh [FOLDER]               # `make test demo` in a fresh clone of HEAD in a fresh Debian
#     sudo test/tools/elsewhere.sh FOLDER make unit       # another command; the Debian in FOLDER is used again
#
# As root, the script unpacks a minimal Debian into FOLDER (default: a temporary folder, which is kept). The Debian has
# only the packages that CONTRIBUTING asks for: python3, make, gcc and libnuma1. The command runs in namespaces of its
# own: another user without root's rights and with umask 077, another home, Turkish in an encoding that is not UTF-8,
# another time zone, a host name that nothing resolves, one core, and 64 MB of /dev/shm, as in containers. The script
# needs 15 GB of disk and the network. It takes twenty minutes to an hour, depending on the network.
#
# Without root, the command runs in a fresh clone in FOLDER, with another home, locale and time zone, and one core.
#
# The variables SUITE and LOCALE choose another Debian and another locale, MIRROR another source of packages, and
# BIND="/folder /another" folders of this machine that the command can read. The command receives only the environment
# variables for certificates, proxies, pip and uv.
set -euo pipefail

SUITE=${SUITE:-bookworm} LOCALE=${LOCALE:-tr_TR.ISO-8859-9}
TOP=$(git -C "$(dirname "$0")" rev-parse --show-toplevel)
FOLDER=$(realpath -m "${1:-$(mktemp -d -t elsewhere-XXXXXX)}")
shift || true
[ $# -gt 0 ] || set -- make test demo

mapfile -t PASSED < <(env | grep -E '^(PIP_|UV_|SSL_CERT|REQUESTS_CA|CURL_CA|(https?|no|HTTPS?|NO)_(proxy|PROXY)=)' || true)
# Kathmandu's time is UTC+5:45.
THERE=(TZ=Asia/Kathmandu PATH=/usr/local/bin:/usr/bin:/bin "${PASSED[@]}")

clone() { # without the files that git ignores
  rm -rf "$1"
  git clone -q --no-hardlinks "$TOP" "$1"
}

if [ "$(id -u)" != 0 ]; then
  echo "elsewhere: not root: the same system and user, in $FOLDER"
  mkdir -p "$FOLDER/home"
  clone "$FOLDER/clone"
  cd "$FOLDER/clone"
  exec env -i "${THERE[@]}" PATH="$PATH" HOME="$FOLDER/home" LC_ALL=C taskset -c 0 "$@"
fi

command -v debootstrap > /dev/null || { echo "elsewhere: needs debootstrap: apt-get install debootstrap" >&2; exit 2; }
ROOT=$FOLDER/root
if [ ! -e "$ROOT/.ready" ]; then
  rm -rf "$ROOT"
  mkdir -p "$FOLDER"
  chmod 755 "$FOLDER"
  debootstrap --variant=minbase \
    --include=ca-certificates,gcc,libc6-dev,libnuma1,locales,make,python3,python3-dev,python3-venv \
    "$SUITE" "$ROOT" ${MIRROR:+"$MIRROR"} > "$FOLDER/debootstrap.log" || { tail "$FOLDER/debootstrap.log" >&2; exit 2; }
  echo "$LOCALE ${LOCALE#*.}" > "$ROOT/etc/locale.gen"
  chroot "$ROOT" locale-gen > /dev/null
  chroot "$ROOT" useradd --home-dir /srv/ayse --create-home --shell /bin/bash ayse
  touch "$ROOT/.ready"
fi
[ ! -e /etc/ssl/certs/ca-certificates.crt ] || cp -L /etc/ssl/certs/ca-certificates.crt "$ROOT/etc/ssl/certs/"
cp -L /etc/resolv.conf "$ROOT/etc/resolv.conf"
echo "127.0.0.1 localhost" > "$ROOT/etc/hosts"
clone "$ROOT/srv/ayse/clone"
chroot "$ROOT" chown -R ayse: /srv/ayse

export ROOT BIND=${BIND:-}
exec unshare --mount --uts --ipc --pid --fork bash -c '
  set -e
  hostname elsewhere
  for folder in $BIND; do
    mkdir -p "$ROOT$folder"
    mount --rbind "$folder" "$ROOT$folder"
    mount -o remount,bind,ro "$ROOT$folder"
  done
  mount -t proc proc "$ROOT/proc"
  mount --rbind /sys "$ROOT/sys"
  mount --bind /dev "$ROOT/dev"
  mount -t tmpfs -o size=64m,mode=1777 tmpfs "$ROOT/dev/shm"
  mount -t tmpfs -o mode=1777 tmpfs "$ROOT/tmp"
  umask 077
  exec taskset -c 0 setpriv --no-new-privs chroot --userspec=ayse:ayse "$ROOT" \
    env -i "$@"' bash "${THERE[@]}" HOME=/srv/ayse USER=ayse LC_ALL="$LOCALE" \
  bash -c 'cd ~/clone && exec "$@"' bash "$@"
