#!/bin/sh
# Install what lab hosts need: root, systemd-nspawn, mmdebstrap, an ssh client, git, rsync.
# Prints exactly what is missing where it cannot install.
set -eu

need=""
want() { command -v "$1" >/dev/null 2>&1 || need="$need $2"; }
want mmdebstrap mmdebstrap
want systemd-nspawn systemd-container
want systemd-analyze systemd
want ssh openssh-client
want sshd openssh-server
want git git
want rsync rsync

[ -n "$need" ] || [ "$(id -u)" -ne 0 ] || exit 0
if [ "$(id -u)" -ne 0 ]; then
    echo "lab hosts are real systemd containers and need root: run this again with sudo" >&2
    [ -z "$need" ] || echo "missing packages:$need   (sudo apt-get install -y$need)" >&2
    exit 1
fi
command -v apt-get >/dev/null 2>&1 || { echo "missing:$need (no apt-get here: install them with your package manager)" >&2; exit 1; }
echo "installing:$need"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# The server is for tests that start an sshd of their own: no service of the machine is started.
printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d.ddtree-ops
chmod 755 /usr/sbin/policy-rc.d.ddtree-ops
own_policy=no
if [ ! -e /usr/sbin/policy-rc.d ]; then mv /usr/sbin/policy-rc.d.ddtree-ops /usr/sbin/policy-rc.d; own_policy=yes; else rm -f /usr/sbin/policy-rc.d.ddtree-ops; fi
trap '[ $own_policy = no ] || rm -f /usr/sbin/policy-rc.d' EXIT
# shellcheck disable=SC2086
apt-get install -y -qq --no-install-recommends $need >/dev/null
