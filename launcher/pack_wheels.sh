#!/usr/bin/env bash
# Pack what a machine without a network lacks: bash launcher/pack_wheels.sh [--python 3.12] [--has FILE] [--with NAME]... [FOLDER]
# Puts wheels of asyncrl and of all that it needs into FOLDER (default: build/wheels), for Linux on x86_64 and the machine's Python.
# Versions are those of launcher/requirements.lock. The machine must have torch; torch and what torch needs are never packed.
#
#   --python X.Y  the machine's Python (default: 3.12)
#   --has FILE    what the machine has: the output of `python3 -m pip list --format=freeze` there. A package is left out if the
#                 version there meets every requirement on it. Without --has, the machine is taken to have torch only; then all that
#                 asyncrl needs has 80 MB, which is too much.
#   --with NAME   another package of launcher/requirements.lock and all that it needs, such as pytest-asyncio; may be repeated
#
# It fails if the folder has more than 60 MB. At its end it prints the command that installs the wheels on the machine.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

case " $* " in
*" -h "* | *" --help "*)
    sed -n '2,13s/^# \{0,1\}//p' "$ASYNCRL_ROOT/launcher/pack_wheels.sh"
    exit 0
    ;;
esac
asyncrl_setup dev
exec python "$ASYNCRL_ROOT/launcher/pack_wheels.py" "$@"
