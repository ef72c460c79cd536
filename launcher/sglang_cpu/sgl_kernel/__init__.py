"""A stub of the package from which SGLang 0.5.23 imports its compiled kernels. They have no build for a CPU without AMX.

With `--device cpu --attention-backend torch_native` SGLang computes with torch alone. Some of its modules (speculative decoding,
moving the KV cache) nevertheless import these names. Generation for asyncrl calls none of them. If one is called, it raises
NotImplementedError instead of computing something wrong.
"""

from collections.abc import Callable
from typing import NoReturn


def _absent(name: str) -> Callable[..., NoReturn]:
    def kernel(*_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} is a compiled kernel, and this environment has none (launcher/setup_sglang.sh --cpu): "
            "leave out the server argument that needs it, or run SGLang on a GPU"
        )

    kernel.__name__ = name
    return kernel


assign_draft_cache_locs_contiguous_cpu = _absent("assign_draft_cache_locs_contiguous_cpu")
assign_extend_cache_locs_cpu = _absent("assign_extend_cache_locs_cpu")
assign_req_to_token_pool_cpu = _absent("assign_req_to_token_pool_cpu")
build_draft_decode_metadata_cpu = _absent("build_draft_decode_metadata_cpu")
build_tree_kernel_efficient_cpu = _absent("build_tree_kernel_efficient_cpu")
copy_all_layer_kv_cache_cpu = _absent("copy_all_layer_kv_cache_cpu")
fill_accept_out_cache_loc_cpu = _absent("fill_accept_out_cache_loc_cpu")
fill_bonus_tokens_cpu = _absent("fill_bonus_tokens_cpu")
reconstruct_indices_from_tree_mask_cpu = _absent("reconstruct_indices_from_tree_mask_cpu")
rotate_input_ids_cpu = _absent("rotate_input_ids_cpu")
verify_tree_greedy_cpu = _absent("verify_tree_greedy_cpu")
