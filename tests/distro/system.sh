# shellcheck shell=bash
# For the scripts of this folder, to source: bare Debian systems below build/distro of this repository.
#   check_tools NAME             ends the script NAME where there is no root or no debootstrap
#   make_system RELEASE FOLDER   debootstrap of Debian RELEASE (12, 13) into FOLDER, unless it is there; log in FOLDER.log
#   enter FOLDER HERE THERE CMD  becomes a shell that runs CMD in the system, with folder HERE at its THERE.
#                                In a name space of its own: what CMD mounts, kills or leaves behind is gone with it
# DEBIAN_MIRROR names another mirror.

declare -A suites=([12]=bookworm [13]=trixie)

check_tools() {
  [ "$(id -u)" -eq 0 ] || { echo "$1: needs root, for a system of its own and its mounts" >&2; exit 2; }
  command -v debootstrap >/dev/null || { echo "$1: apt-get install debootstrap" >&2; exit 2; }
}

make_system() {
  [ ! -e "$2/.made" ] || return 0
  rm -rf "$2"
  mkdir -p "$2"
  debootstrap --variant=minbase "${suites[$1]}" "$2" "${DEBIAN_MIRROR:-http://deb.debian.org/debian}" >"$2.log"
  touch "$2/.made"
}

enter() {
  mkdir -p "$1$3"
  # shellcheck disable=SC2016  # the inner shell expands it
  exec unshare --mount --pid --fork --kill-child bash -c '
    set -e
    mount --make-rprivate /
    mount --bind "$0" "$0"
    mount -t proc proc "$0/proc"
    mount --rbind /dev "$0/dev"
    mount -t tmpfs -o mode=1777 tmpfs "$0/dev/shm"
    mount -t tmpfs -o mode=755 tmpfs "$0/run"  # as after a boot: no names of network spaces that are gone
    mkdir -m 1777 "$0/run/lock"
    mount --rbind /sys "$0/sys"
    mount --bind "$1" "$0$2"
    cd "$0"
    pivot_root . .  # and not chroot: tests enter the mounts of other processes, and there the root is what this makes it
    umount -l .
    status=0  # this shell stays: process 1 has to reap what others leave behind, and ctest would not
    /usr/bin/env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 \
      bash -c "$3" || status=$?
    exit $status' "$@"
}
