#!/bin/sh
# Install the Debian or Ubuntu packages that `make demo` and `make test` need; say exactly what is missing where that
# cannot be done. `system-packages.sh test` adds what only the tests need. DDTREE_OPS_SKIP_LAB=1: no lab hosts, no root.
set -eu

python=${PYTHON:-python3}
if ! command -v "$python" >/dev/null 2>&1 && [ -n "${PYTHON:-}" ] && [ "$python" != python3 ]; then
    echo "there is no $python: name one that is there, make PYTHON=python3.12 ..." >&2
    exit 1
fi
packages=""
want() { command -v "$1" >/dev/null 2>&1 || packages="$packages $2"; }
want git git
"$python" -c 'import ensurepip' 2>/dev/null || packages="$packages python3-venv"
if [ "${DDTREE_OPS_SKIP_LAB:-}" != 1 ]; then
    want mmdebstrap mmdebstrap
    want systemd-nspawn systemd-container
    want ssh openssh-client
    if [ "${1:-}" = test ]; then
        want systemd-analyze systemd
        [ -x /usr/sbin/sshd ] || packages="$packages openssh-server"
    fi
    if [ "$(id -u)" -ne 0 ]; then
        echo "lab hosts are real systemd containers and need root: run this again with sudo" >&2
        [ -z "${1:-}" ] || echo "or leave their tests out: DDTREE_OPS_SKIP_LAB=1 make $1" >&2
        [ -z "$packages" ] || echo "also missing: sudo apt-get install -y$packages" >&2
        exit 1
    fi
fi
[ -n "$packages" ] || exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "missing: sudo apt-get install -y$packages" >&2
    exit 1
fi

echo "installing:$packages"
export DEBIAN_FRONTEND=noninteractive
# Tests start an sshd of their own; no service of this machine is to be started by installing one.
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
    trap 'rm -f $policy' EXIT INT TERM
    printf '#!/bin/sh\nexit 101\n' >$policy
    chmod 755 $policy
fi
apt-get update -qq
# shellcheck disable=SC2086
apt-get install -y -qq --no-install-recommends $packages >/dev/null
