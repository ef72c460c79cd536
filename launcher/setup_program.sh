# setup_sglang.sh and setup_vllm.sh source this file, which makes the separate environment of a program.
#
# Environment: PYTHON  the interpreter that makes the environment (default: python3, 3.11 or newer)
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

# asyncrl_program_options SCRIPT ARGUMENTS...: read --cpu and --venv DIR into `kind` (gpu or cpu) and `venv`. --help prints the head
# of the script. Also sets `python`, and `pip_install`, a command for the environment.
asyncrl_program_options() {
    local script="$1" name
    name="$(basename "$script")"
    shift
    venv="$ASYNCRL_ROOT/.venv-$(sed 's/setup_\(.*\)\.sh/\1/' <<<"$name")" python="${PYTHON:-python3}" kind=gpu
    while [ $# -gt 0 ]; do
        case "$1" in
        -h | --help)
            sed -n '2,/^set/s/^# \{0,1\}//p' "$script"
            exit 0
            ;;
        --cpu) kind=cpu ;;
        --venv)
            venv="${2:?--venv needs a folder}"
            shift
            ;;
        *)
            echo "$name: $1 is not known; see bash launcher/$name --help" >&2
            exit 2
            ;;
        esac
        shift
    done
    [[ "$venv" = /* ]] || venv="$PWD/$venv"
    pip_install=("$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off) # not uv: no lock has all versions
}

# asyncrl_program_setup PROGRAM VERSION STAMP STEPS: make the environment, unless it has this stamp. The script defines
# `install_steps`, which runs that many steps (_asyncrl_step) and returns 1 if one fails.
asyncrl_program_setup() {
    local program="$1" version="$2" stamp="$venv/.asyncrl-$3" steps="$4" step=0 log
    local ASYNCRL_VENV_OPTION="--venv "
    [ -e "$stamp" ] || _asyncrl_make_environment || return 1
    echo "$program $version is ready: generation.python=$venv/bin/python"
}

# Durations were measured on a machine with 2 cores and a fast network.
_asyncrl_make_environment() {
    local has_pip=1
    _asyncrl_check_python || return 1
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 || has_pip=0
    steps=$((steps + 1 - has_pip))
    log="$(mktemp "${TMPDIR:-/tmp}/asyncrl-program.XXXXXX")" || log=/dev/null
    echo "== setting up $program $version for $kind in $venv: $steps steps, some minutes the first time"
    [ $has_pip = 1 ] || _asyncrl_step 10 "making the virtual environment" "$python" -m venv --clear "$venv" || return 1
    install_steps || return 1
    touch "$stamp"
    [ "$log" = /dev/null ] || rm -f "$log"
}
