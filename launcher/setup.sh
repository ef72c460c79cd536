# The other scripts source this file. asyncrl_setup makes a virtual environment with asyncrl and the extras in $1 (may be empty), and
# puts it first in PATH.
#
# Environment: ASYNCRL_VENV   folder of the environment (default: .venv in the repository)
#              ASYNCRL_EXTRAS further extras that a run needs, such as gym (defined in pyproject.toml)
#              ASYNCRL_TORCH  the torch version to install (default: asyncrl_torch; an open range could install another build)
#              PYTHON         the interpreter that makes the environment (default: python3, 3.11 or newer)

ASYNCRL_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# The version that the tested SGLang pins. On a machine with GPUs both environments use it (see setup_sglang.sh): weights are sent
# between them by NCCL, which refuses a peer of another version.
ASYNCRL_CUDA_TORCH=2.14.1

_asyncrl_has_gpu() {
    command -v nvidia-smi >/dev/null 2>&1 || compgen -G "/dev/nvidia[0-9]*" >/dev/null
}

asyncrl_torch() {
    if _asyncrl_has_gpu; then
        echo "$ASYNCRL_CUDA_TORCH"
    else
        echo 2.13.0 # as in requirements.lock
    fi
}

asyncrl_setup() {
    local extras="$1" venv="${ASYNCRL_VENV:-$ASYNCRL_ROOT/.venv}" python="${PYTHON:-python3}"
    local torch="${ASYNCRL_TORCH:-$(asyncrl_torch)}" stamp
    [[ "$venv" = /* ]] || venv="$PWD/$venv"
    # One stamp file per set of requirements: a second start installs nothing and needs no network.
    stamp="$venv/.asyncrl-$(cat "$ASYNCRL_ROOT/pyproject.toml" "$ASYNCRL_ROOT/launcher/requirements.lock" - <<<"$extras $torch $ASYNCRL_ROOT" | cksum | cut -d' ' -f1)"
    [ -e "$stamp" ] || _asyncrl_install || return 1
    PATH="$venv/bin:$PATH"
    ASYNCRL_ACTIVATE="$(printf '. %q' "$venv/bin/activate")" # for the next steps that `asyncrl-launch run` prints at its end
    export PATH VIRTUAL_ENV="$venv" ASYNCRL_ACTIVATE
}

# Uses the variables of asyncrl_setup. Durations were measured on a machine with 2 cores and a fast network.
_asyncrl_install() {
    local log step=0 steps=1
    _asyncrl_check_python || return 1
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 || steps=2
    log="$(mktemp "${TMPDIR:-/tmp}/asyncrl-setup.XXXXXX")" || log=/dev/null
    echo "== setting up asyncrl${extras:+[$extras]} in $venv: $steps step$([ $steps = 1 ] || echo s), a minute or two the first time"
    [ $steps = 1 ] || _asyncrl_step 5 "making the virtual environment" "$python" -m venv --clear "$venv" || return 1
    if ! _asyncrl_has_gpu && [ "$(uname)" = Linux ] && ! [[ "$("$venv/bin/python" -m pip config list)" =~ (index-url|find-links)= ]]; then
        echo "== there is no GPU here, and PyPI's torch brings 5.8 GB for GPUs. To do without, stop and start again with"
        echo "==   export PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu"
    fi
    # The tested versions. torch is a requirement of its own, since a machine with GPUs has another one.
    grep -v "^torch==" "$ASYNCRL_ROOT/launcher/requirements.lock" >"$venv/.asyncrl-constraints" || return 1
    _asyncrl_step 20 "installing torch $torch, asyncrl and all that they need" "$venv/bin/python" "$ASYNCRL_ROOT/launcher/install_packages.py" \
        "torch==$torch" -e "$ASYNCRL_ROOT${extras:+[$extras]}" -c "$venv/.asyncrl-constraints" || return 1
    touch "$stamp"
    [ "$log" = /dev/null ] || rm -f "$log"
}

_asyncrl_check_python() {
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "asyncrl needs Python 3.11 or newer; '$python' is $("$python" --version 2>&1). Set PYTHON=/path/to/python3" >&2
        return 1
    fi
}

# _asyncrl_step SECONDS WHAT COMMAND...: run the command with its output in $log, and show the elapsed time.
_asyncrl_step() {
    local typical="$1" what="$2" start=$SECONDS code=0 ticker
    shift 2
    step=$((step + 1))
    echo "-- step $step of $steps: $what (about $typical s)"
    _asyncrl_tick $$ "$start" "$typical" &
    ticker=$!
    "$@" >"$log" 2>&1 || code=$?
    kill "$ticker" 2>/dev/null || true
    wait "$ticker" 2>/dev/null || true
    [ ! -t 1 ] || printf '\r\033[K'
    if [ $code = 0 ]; then
        sed -n 's/^asyncrl: /   /p' "$log" # why launcher/install_packages.py took pip
        echo "   done in $((SECONDS - start)) s"
        return 0
    fi
    {
        echo "   failed after $((SECONDS - start)) s, exit code $code. What was said last (all of it: $log):"
        tail -n 12 "$log" | sed 's/^/   | /'
        echo "   -> $(_asyncrl_remedy "$1")"
    } >&2
    return 1
}

# On a terminal, update one line with the elapsed time and pip's last output every second; elsewhere print a line every 30 s. Ends when
# the script ends.
_asyncrl_tick() {
    local elapsed
    while sleep 1 >/dev/null 2>&1 && kill -0 "$1" 2>/dev/null; do
        elapsed=$((SECONDS - $2))
        if [ -t 1 ]; then
            printf '\r\033[K   %d s (usually about %d s)  %s' "$elapsed" "$3" "$(tail -n 1 "$log" | tr -dc '[:print:]' | cut -c 1-40)"
        elif [ $((elapsed % 30)) = 0 ]; then
            echo "   $elapsed s so far"
        fi
    done
}

_asyncrl_remedy() {
    local version option="${ASYNCRL_VENV_OPTION:-ASYNCRL_VENV=}"
    if grep -q 'No space left on device\|Disk quota exceeded' "$log"; then
        echo "the disk is full: make room, or ${option}/larger/disk/venv (pip's and uv's own files: TMPDIR=... PIP_CACHE_DIR=... UV_CACHE_DIR=...)"
    elif grep -q 'name resolution\|new connection\|unreachable\|timed out\|Max retries\|ProxyError\|not known\|SSLError' "$log"; then
        echo "the package index cannot be reached: check the network, set https_proxy, or PIP_INDEX_URL to a mirror; then start again"
    elif grep -q 'Permission denied\|Read-only file system' "$log"; then
        echo "$venv cannot be written: set ${option%[= ]} to a folder that can"
    elif grep -q 'ensurepip\|No module named venv' "$log"; then
        echo "'$python' cannot make virtual environments; on Debian: apt-get install python3-venv"
    elif grep -q 'different Python\|No matching distribution' "$log"; then
        version="$("$1" --version 2>&1 || true)"
        echo "there is no such package for $version on this machine: PYTHON=/path/to/another/python3 (3.11 to 3.13), or ASYNCRL_TORCH=..."
    else
        echo "mend what is said above and start again: what is installed already stays"
    fi
}
