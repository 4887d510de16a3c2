"""vLLM's methods and keys that are refused or have no effect here, each with the reason."""

from __future__ import annotations

HEADS = "use an EAGLE3 head (method eagle3), or ngram or suffix, which need no weights"
REFUSED_METHODS = {
    "medusa": HEADS,
    "mlp_speculator": HEADS,
    "draft_model": f"a second model as drafter is not supported; {HEADS}",
    "mtp": f"gpt-oss has no multi-token prediction layers; {HEADS}",
    "dflash": f"block diffusion drafters are not supported; {HEADS}",
    "dspark": f"block diffusion drafters are not supported; {HEADS}",
    "p-eagle": f"parallel drafting is not supported; {HEADS}",
    "extract_hidden_states": "it writes hidden states for training and drafts nothing",
    "custom_class": f"external code is not loaded into the engine; {HEADS}",
}
# Parts of a model's name that say what it is, more specific ones first.
NAMED = (("p-eagle", "p-eagle"), ("peagle", "p-eagle"), ("dflash", "dflash"), ("dspark", "dspark"),
          ("medusa", "medusa"), ("-mtp", "mtp"))  # fmt: skip

OWN_FILES = "the head's files determine it"
KERNELS = "Chorale picks its own kernels"
EXACT = "a draft token is accepted if it equals the sampled token; answers are those without speculation"
# vLLM's keys without effect, each with the reason.
IDLE = {
    "quantization": OWN_FILES,
    "max_model_len": OWN_FILES,
    "index_share_for_mtp_iteration": OWN_FILES,
    "code_revision": "no remote code is ever run",
    "moe_backend": KERNELS,
    "attention_backend": KERNELS,
    "kv_cache_dtype": KERNELS,
    "enforce_eager": "--enforce-eager decides for the drafts, too",
    "draft_load_config": "weights are read from safetensors",
    "disable_padded_drafter_batch": KERNELS,
    "disable_eagle_block_drop": "no block of a prefix is dropped",
    "use_local_argmax_reduction": "the head is replicated on each rank",
    "draft_sample_method": "drafts are sampled with the noise of the tokens that they guess",
    "acceptance_method": EXACT,
    "posterior_threshold": EXACT,
    "posterior_alpha": EXACT,
    "disable_logprobs": "log-probabilities are those without speculation",
    "disable_log_stats": "--disable-log-stats concerns drafts, too",
    "suffix_decoding_min_token_prob": "a suffix is followed where it occurred last, not by frequency",
    "dspark_draft_topk": "it belongs to another method",
}
# Keys that are refused unless their value requests nothing.
REFUSED = {
    "parallel_drafting": REFUSED_METHODS["p-eagle"],
    "use_heterogeneous_vocab": "a head drafts tokens of gpt-oss's vocabulary",
    "enable_adaptive_verification": "num_speculative_tokens_per_batch_size sets the number of draft tokens",
    "tensor_parallel_size": "its name is draft_tensor_parallel_size",
    "target_model_config": "it is not an option",
    "target_parallel_config": "it is not an option",
    "draft_model_config": "it is not an option",
    "draft_parallel_config": "it is not an option",
}
