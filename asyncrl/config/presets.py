"""Presets: algorithms and corrections by name. Each is a set of overrides of the experiment's config.

`read_experiment` merges the presets named by `train.algorithm` and `train.correction` onto the defaults, before the user's fields.
A field that the user sets wins; the other fields of the preset appear in the resolved config. No other code reads the name.
config.PPOConfig explains the fields, docs/algorithms.md has equations and papers. To add a preset, add a name here, and a
function in asyncrl/algorithms if no field expresses it yet.

A value `${...}` is copied from that field of the same config (OmegaConf interpolation).
"""

from __future__ import annotations

from typing import Any

Overrides = dict[str, Any]  # nested, from the root of ExperimentConfig

_MAX_NEW_TOKENS = "${rollout.sampling.max_new_tokens}"

# train.algorithm
ALGORITHMS: dict[str, Overrides] = {
    # Schulman et al., arXiv:1707.06347; advantages by GAE (arXiv:1506.02438) from a critic, normalised over the batch
    "ppo": {
        "train": {
            "critic": {},
            "ppo": {
                "baseline": "none",
                "advantage_norm": "batch",
                "policy_loss": "clip",
                "importance_level": "token",
                "loss_normalization": "token",
                "kl_in": "reward",
                "kl_estimator": "k1",
            },
        }
    },
    # Shao et al., DeepSeekMath, arXiv:2402.03300
    "grpo": {
        "train": {
            "ppo": {
                "advantage_norm": "group",
                "policy_loss": "clip",
                "importance_level": "token",
                "loss_normalization": "sequence",
                "kl_in": "loss",
                "kl_estimator": "k3",
            }
        }
    },
    # Liu et al., Understanding R1-Zero-like training, arXiv:2503.20783
    "dr_grpo": {
        "train": {
            "ppo": {
                "baseline": "group_mean",
                "advantage_norm": "none",
                "policy_loss": "clip",
                "importance_level": "token",
                "loss_normalization": "constant",
                "loss_length": _MAX_NEW_TOKENS,
            }
        }
    },
    # Ahmadian et al., Back to basics, arXiv:2402.14740
    "rloo": {
        "train": {
            "ppo": {
                "baseline": "leave_one_out",
                "advantage_norm": "none",
                "policy_loss": "clip",
                "importance_level": "token",
                "loss_normalization": "constant",
                "loss_length": _MAX_NEW_TOKENS,
                "kl_in": "reward",
                "kl_estimator": "k1",
            }
        }
    },
    # Hu et al., arXiv:2501.03262. For its variant "with baseline" add train.ppo.baseline=group_mean
    "reinforce_pp": {
        "train": {
            "ppo": {
                "baseline": "none",
                "advantage_norm": "batch",
                "discount": 1.0,
                "gae_lambda": 1.0,
                "policy_loss": "clip",
                "importance_level": "token",
                "loss_normalization": "token",
                "kl_in": "reward",
                "kl_estimator": "k1",
            }
        }
    },
    # Yu et al., arXiv:2503.14476: clip-higher, token loss, dynamic sampling, overlong reward shaping
    "dapo": {
        "rollout": {"reject_equal_rewards": True},
        "train": {
            "ppo": {
                "advantage_norm": "group",
                "policy_loss": "clip",
                "importance_level": "token",
                "eps_clip": 0.2,
                "eps_clip_higher": 0.28,
                "loss_normalization": "token",
                "overlong_penalty": 1.0,
                "overlong_length": _MAX_NEW_TOKENS,
                "overlong_buffer": 0.2,
            }
        },
    },
    # Zheng et al., arXiv:2507.18071; clip range of its section 5.1
    "gspo": {
        "train": {
            "ppo": {
                "advantage_norm": "group",
                "policy_loss": "clip",
                "importance_level": "sequence",
                "eps_clip": 3.0e-4,
                "eps_clip_higher": 4.0e-4,
                "loss_normalization": "sequence",
            }
        }
    },
    # MiniMax, arXiv:2506.13585: no lower bound. The weight's upper bound, 5, is that of Khatri et al., ScaleRL, arXiv:2510.13786
    "cispo": {
        "train": {
            "ppo": {
                "advantage_norm": "group",
                "policy_loss": "cispo",
                "importance_level": "token",
                "eps_clip": 1.0,
                "eps_clip_higher": 4.0,
                "loss_normalization": "token",
            }
        }
    },
}


def _correction(mode: str, cap: float, floor: float | None) -> Overrides:
    ppo = {
        "use_decoupled_loss": True,
        "behav_imp_weight_mode": mode,
        "behav_imp_weight_cap": cap,
        "behav_imp_weight_floor": floor,
    }
    return {"train": {"ppo": ppo}}


# train.correction: bounds of the decoupled loss's weight proximal / behaviour
CORRECTIONS: dict[str, Overrides] = {
    "mask": _correction("mask", 5.0, None),  # Fu et al., AReaL, arXiv:2505.24298; the defaults of PPOConfig
    "tis": _correction("clamp", 2.0, None),  # Yao et al., fengyao.notion.site/off-policy-rl (2025)
    "icepop": _correction("mask", 5.0, 0.5),  # Ling Team, Ring-1T, arXiv:2510.18855
}
