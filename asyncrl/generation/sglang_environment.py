"""The settings that SGLang makes in its environment at its start."""

from __future__ import annotations

from collections.abc import Mapping


def nccl_settings(server_args: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """The settings of NCCL that SGLang makes at its start (_set_envs_and_config), for the other members of its groups: with other
    ones NCCL refuses the group or hangs. Those that the environment sets stay, because both sides inherit them."""
    given = {name.removeprefix("--"): value.lower() for name, value in server_args.items()}

    def is_on(flag: str) -> bool:
        return given.get(flag, "false") in ("", "true")

    symmetric = is_on("enable-symm-mem")
    found = {"NCCL_CUMEM_ENABLE": symmetric, "NCCL_NVLS_ENABLE": symmetric or is_on("enable-nccl-nvls")}
    # SGLang overrides the environment only for a flag
    return {name: str(int(on)) for name, on in found.items() if on or name not in environment}
