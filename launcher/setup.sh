# Sourced by the other scripts: puts a virtual environment with asyncrl and the extras in $1 (may be empty) in front.
#
# Environment: ASYNCRL_VENV  where the environment is (default: .venv in the repository)
#              ASYNCRL_TORCH the torch version to install (default below; an open range could pull another build)
#              PYTHON        the interpreter it is made with (default: python3, 3.10 or newer)

ASYNCRL_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

asyncrl_setup() {
    local extras="$1" venv="${ASYNCRL_VENV:-$ASYNCRL_ROOT/.venv}" python="${PYTHON:-python3}"
    local torch="${ASYNCRL_TORCH:-2.13.0}" stamp
    [[ "$venv" = /* ]] || venv="$PWD/$venv"
    # One stamp per set of requirements: a second start installs nothing and needs no network.
    stamp="$venv/.asyncrl-$(cat "$ASYNCRL_ROOT/pyproject.toml" - <<<"$extras $torch $ASYNCRL_ROOT" | cksum | cut -d' ' -f1)"
    if [ ! -e "$stamp" ]; then
        if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
            echo "asyncrl needs Python 3.10 or newer; '$python' is $("$python" --version 2>&1). Set PYTHON=/path/to/python3" >&2
            return 1
        fi
        if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
            echo "== making the virtual environment $venv"
            "$python" -m venv --clear "$venv" || {
                echo "cannot make a virtual environment with '$python'; on Debian: apt-get install python3-venv" >&2
                return 1
            }
        fi
        echo "== installing asyncrl${extras:+[$extras]} into $venv (some minutes the first time)"
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "torch==$torch" || return 1
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -e "$ASYNCRL_ROOT${extras:+[$extras]}" || return 1
        touch "$stamp"
    fi
    PATH="$venv/bin:$PATH"
    export PATH VIRTUAL_ENV="$venv"
}
