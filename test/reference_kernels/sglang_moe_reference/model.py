"""Tiny checkpoints with random weights, with which the real engine runs on small machines.

``make_model`` writes a checkpoint of random numbers. ``benchmark/tiny_moe`` trains a model of the same form, and writes
it with this module's ``quantize_experts`` and ``write_checkpoint``.

The architecture is that of a model family (see ``families``) with small sizes. The model's answers are nonsense, but
they are always the same, and they depend on every part of the model. A wrong expert, a wrong scale or an overwritten
activation changes them. The answers can therefore show that two servers compute the same. They say nothing about
accuracy.

Quantization follows ModelOpt's layout: the routed experts of the main model are NVFP4, all other weights are bfloat16.
The NextN layer (multi-token prediction) is bfloat16, because the engine disables ``modelopt_fp4`` there.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_moe_reference.families import FAMILIES, ModelSpec, Tensor, expert_prefix, tensors

if TYPE_CHECKING:  # torch takes seconds to import, and the command line imports this module for --help
    import torch

MARKER = "sglang_moe_patches_tiny_model"
"""Key of config.json that marks a directory written by ``make_model``. Only such a directory may be replaced."""

# Standard deviations are gain / sqrt(fan_in). The gains were chosen so that answers to GSM8K prompts have three
# properties. They depend on the whole prompt (with a gain of 1, attention is nearly a plain average). They do not
# repeat themselves in a loop. If every activation is rounded to bfloat16, only about 3 % of the greedy tokens change
# (with a smaller embedding, a change of the routing changes more tokens).
GAINS = {
    "embed_tokens": 2.0,  # the standard deviation itself, because an embedding has no fan-in
    "q_b_proj": 1.5,
    "q_norm": 1.5,  # if queries are normalised, this weight decides how large they are
    "lm_head": 3.0,
}
NORM_SPREAD = 0.1
"""Standard deviation of RMSNorm's weights, whose mean is 1. If a norm is skipped or applied twice, the answers then
change."""
BIAS_STD = 0.5
"""Standard deviation of the biases of queries, keys and values. The outputs of these linear layers have standard
deviation 1."""
CORRECTION_BIAS_STD = 0.02
CALIBRATION_TOKENS = 256
CALIBRATION_MARGIN = 1.5

SPECIAL_TOKENS = ("<|begin_of_sentence|>", "<|end_of_sentence|>", "<|pad|>")
BOS_ID, EOS_ID, PAD_ID = range(3)

# Words of school arithmetic problems. A GSM8K prompt has 1.7 times fewer tokens than bytes.
WORDS = """
a about after all also an and another answer apples are as at away bag bags bakes be before between bike book books
bought box boxes break bring brings buckets bus buses buy buys by cake cakes can cards cars cents child children come
cookies cost costs cow cows cuts day days die do does dollars drives each earn earns eat eats eggs empty evening every
farmer fewer fill finally first fit five flour food for four friends from game gave get gets give gives go had half has
have he hen hens her him his hold holds hour hours house how if in into is it its job keep leave left less long loses
lunch made make makes man many men miles minutes money month months more morning much need needed needs new next nine
now number of off old on one ones only or other out over packs pages paid pay pays pens people per person pick picks
piece pieces plants pool pounds price put puts read reads rest room rooms rows runs same saves school seats second sell
sells seven share she shop sick sit six sold some spend spends starts stay still stop students take takes ten than that
the their them then there they third this three ticket time times to together total toys train trees trip twice two up
us was water week weeks were what when which while will with work worked works year years A After Amy Ann Answer At Ben
Dan Each Eva First Friday He How If In It Kim Leo Max Mia Monday Now On One Question Sam She So Sunday That The Then
There They This Together Tom What With Zoe
"""
# Tokens at the start of a line, which lack the leading space of the tokens above, and the signs of GSM8K's annotations.
LINE_STARTS = """
After Amy Ann Answer Ben Dan Each Eva He In It Kim Leo Max Mia Now Question Sam She So That The Then There They Together
Tom With Zoe
<< >> ##
"""


def config(spec: ModelSpec, quantized: bool = True) -> dict[str, Any]:
    """Return the contents of config.json for a spec.

    :param quantized: whether the routed experts are NVFP4. Otherwise all weights are bfloat16.
    """
    family = FAMILIES[spec.family]
    values: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        MARKER: asdict(spec),
        "torch_dtype": "bfloat16",
        "vocab_size": vocab_size(),
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "tie_word_embeddings": False,
        "hidden_size": spec.hidden,
        "hidden_act": "silu",
        "num_hidden_layers": spec.layers,
        "max_position_embeddings": spec.max_position,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "num_experts_per_tok": spec.top_k,
        **family.config(spec),
    }
    if quantized:
        values["quantization_config"] = {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "group_size": 16,
            "ignore": [
                "*self_attn*",
                "*shared_experts*",
                "lm_head",
                *(f"model.layers.{layer}.mlp.*" for layer in range(spec.dense_layers)),
                *([f"model.layers.{spec.layers}.*"] if spec.nextn else []),
            ],
        }
    return values


# --- weights ----------------------------------------------------------------------------------------------------------


def _normal(spec: ModelSpec, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a float32 tensor of random numbers N(0, 1). Each tensor has a random stream of its own.

    A tensor therefore depends on the seed, its name and its shape only.
    """
    import torch

    digest = hashlib.sha256(f"{spec.seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.randn(shape, generator=generator, dtype=torch.float32)


def scaled(tensor: Tensor, normal: torch.Tensor) -> torch.Tensor:
    """Scale random numbers N(0, 1) to the values of a tensor in the model.

    :returns: bfloat16 (the router's correction bias float32, as in the models).
    """
    gain = GAINS.get(tensor.name.rsplit(".", 1)[-1], 1.0)
    if tensor.kind == "linear":
        return (normal * (gain / math.sqrt(tensor.shape[1]))).bfloat16()
    if tensor.kind == "norm":
        return (gain * (1 + NORM_SPREAD * normal)).bfloat16()
    if tensor.kind == "embedding":
        return (normal * gain).bfloat16()
    if tensor.kind == "bias":
        return (normal * BIAS_STD).bfloat16()
    # The bias is rounded to bfloat16, because one of the engine's two TRT-LLM paths does so, and both must route alike.
    return (normal * CORRECTION_BIAS_STD).bfloat16().float()


def original_weights(spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Return the model's tensors before quantization, by the family's checkpoint names.

    :returns: Tensors on the CPU, as ``scaled`` returns them.
    """
    weights = {}
    for tensor in tensors(spec, vocab_size()):
        stream = tensor.key if tensor.kind == "bias" else tensor.name
        weights[tensor.key] = scaled(tensor, _normal(spec, stream, tensor.shape))
    # A row of zeros makes a logit of exactly 0, and the largest of several hundred logits is always above 0. The model
    # therefore never generates unprintable tokens, and reports stay legible.
    weights["lm_head.weight"][_unprintable_ids()] = 0
    return weights


def _quantize_expert(
    gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, tokens: torch.Tensor
) -> list[dict[str, torch.Tensor]]:
    """Quantize one expert. Return ModelOpt's four tensors for each projection: gate, up, down.

    :param gate, up: bfloat16 [intermediate, hidden].
    :param down: bfloat16 [hidden, intermediate].
    :param tokens: float32 [n, hidden], the expert's input in calibration.
    """
    import torch

    from sglang_moe_reference.nvfp4 import E2M1_MAX, E4M3_MAX, global_scale_for, quantize

    # One GEMM computes gate and up together, so they must share their scale.
    gate_up_scale = global_scale_for(torch.cat((gate, up)))
    intermediate = torch.nn.functional.silu(tokens @ gate.float().T) * (tokens @ up.float().T)

    def quantized(weight: torch.Tensor, scale: torch.Tensor, activations: torch.Tensor) -> dict[str, torch.Tensor]:
        packed, block_scale = quantize(weight, scale)
        # Round up to a quarter. This hides the last bits of a matrix product, which depend on the machine.
        amax = math.ceil(float(activations.abs().max()) * CALIBRATION_MARGIN * 4) / 4
        return {
            "weight": packed,
            "weight_scale": block_scale,
            "weight_scale_2": (1 / scale).reshape(()),
            "input_scale": torch.tensor(amax / (E4M3_MAX * E2M1_MAX), dtype=torch.float32),
        }

    return [
        quantized(gate, gate_up_scale, tokens),
        quantized(up, gate_up_scale, tokens),
        quantized(down, global_scale_for(down), intermediate),
    ]


def quantize_experts(
    spec: ModelSpec, weights: Mapping[str, torch.Tensor], seen: Callable[[int, int], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Quantize the routed experts of the main model to ModelOpt's NVFP4. The other weights stay unchanged.

    :param weights: as ``original_weights`` returns them.
    :param seen: function that receives an expert's layer and number, and returns the expert's input in calibration,
        float32 [n, hidden].
    """
    quantized = dict(weights)
    for layer in range(spec.dense_layers, spec.layers):
        for expert in range(spec.experts):
            names = [f"{expert_prefix(spec, layer, expert)}.{name}" for name in FAMILIES[spec.family].projections]
            gate, up, down = (quantized.pop(f"{name}.weight") for name in names)
            for name, parts in zip(names, _quantize_expert(gate, up, down, seen(layer, expert)), strict=True):
                quantized |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
    return quantized


def checkpoint_weights(spec: ModelSpec, quantized: bool = True) -> dict[str, torch.Tensor]:
    """Return the tensors of model.safetensors: ``original_weights``, with ModelOpt NVFP4 experts if ``quantized``.

    :returns: CPU tensors by name. Each projection of a routed expert, [rows, K], then has ``.weight`` uint8 [rows,
        K/2], ``.weight_scale`` float8_e4m3fn [rows, K/16], and ``.weight_scale_2`` and ``.input_scale``, float32
        scalars.
    """
    weights = original_weights(spec)
    if not quantized:
        return weights
    # The output of an RMSNorm is close to a normal distribution with standard deviation 1. The margin covers the rest.
    tokens = _normal(spec, "calibration", (CALIBRATION_TOKENS, spec.hidden))
    return quantize_experts(spec, weights, lambda layer, expert: tokens)


# --- tokenizer --------------------------------------------------------------------------------------------------------


@cache
def _vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return the vocabulary and the merges of a byte-level BPE. The tokens are special tokens, the 256 bytes, and every
    prefix of the words.

    Each merge appends one byte to a prefix of a word. Such merges need no training, and only one sequence of merges
    leads to a token. Digits are never merged, so a number is read digit by digit.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *sorted(ByteLevel.alphabet())])}
    merges = []
    # "Ġ" is byte-level BPE's letter for the space. Words with it come first, because the earliest merge wins.
    for word in [*("Ġ" + word for word in WORDS.split()), *LINE_STARTS.split()]:
        token = word[0]
        for letter in word[1:]:
            if token + letter not in vocabulary:
                vocabulary[token + letter] = len(vocabulary)
                merges.append((token, letter))
            token += letter
    return vocabulary, merges


def vocab_size() -> int:
    """Return the number of tokens of the tokenizer. Every smaller id is a token."""
    return len(_vocabulary()[0])


def _unprintable_ids() -> list[int]:
    """Return the ids of tokens that are no printable ASCII text: control and non-ASCII bytes, and the special tokens
    except end of sentence.
    """
    readable = {chr(byte) for byte in range(0x21, 0x7F)} | {"Ġ", "Ċ", SPECIAL_TOKENS[EOS_ID]}
    unreadable = [index for token, index in _vocabulary()[0].items() if token not in readable and len(token) == 1]
    return [*unreadable, BOS_ID, PAD_ID]


def tokenizer_json() -> str:
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    vocabulary, merges = _vocabulary()
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return str(tokenizer.to_str(pretty=True))


# --- files ------------------------------------------------------------------------------------------------------------


def _json_files(spec: ModelSpec, quantized: bool) -> Mapping[str, dict[str, Any]]:
    bos, eos, pad = SPECIAL_TOKENS
    special = {"bos_token": bos, "eos_token": eos, "pad_token": pad}
    return {
        "config.json": config(spec, quantized),
        "generation_config.json": {
            "bos_token_id": BOS_ID,
            "eos_token_id": EOS_ID,
            "pad_token_id": PAD_ID,
            "do_sample": False,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": spec.max_position,
            "clean_up_tokenization_spaces": False,
            "chat_template": "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n"
            "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}",
            **special,
        },
        "special_tokens_map.json": special,
    }


FILES = frozenset(
    {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
)
"""Names of all files in a model directory."""


def _check_replaceable(directory: Path) -> None:
    """Raise FileExistsError unless the directory is absent, empty, or a model that ``make_model`` wrote."""
    if not directory.exists():
        return
    if not directory.is_dir():
        raise FileExistsError(f"{directory} is a file; name a directory for the model")
    names = {path.name for path in directory.iterdir()}
    if not names:
        return
    try:
        ours = MARKER in json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        ours = False
    if not ours or not names <= FILES:
        foreign = sorted(names - FILES) or ["config.json"]
        raise FileExistsError(
            f"{directory} is not empty and not a tiny model of ours ({', '.join(foreign[:3])}); "
            "name another directory, or empty this one"
        )


def make_model(directory: Path, spec: ModelSpec, *, quantized: bool = True) -> None:
    """Write a checkpoint of random weights that the stock engine loads (``--quantization modelopt_fp4`` if quantized).

    The same spec gives the same bytes.

    :param directory: created with its parents if it does not exist; replaced if an earlier call wrote it.
    :param spec: the sizes and the seed.
    :param quantized: whether the routed experts are NVFP4. Otherwise all weights are bfloat16.
    :raises FileExistsError: the directory contains anything else. Nothing is changed then.
    """
    _check_replaceable(Path(directory))
    write_checkpoint(directory, spec, checkpoint_weights(spec, quantized), quantized=quantized)


def write_checkpoint(
    directory: Path, spec: ModelSpec, weights: Mapping[str, torch.Tensor], *, quantized: bool = True
) -> None:
    """Write a checkpoint with the given weights, in the same form as the checkpoints of ``make_model``.

    :param weights: by the family's checkpoint names, as ``checkpoint_weights`` returns them.
    """
    from safetensors.torch import save_file

    directory = Path(directory)
    _check_replaceable(directory)
    directory.mkdir(parents=True, exist_ok=True)
    # config.json is written first. An unfinished directory then has the marker, and may be replaced.
    for name, content in _json_files(spec, quantized).items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (directory / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    save_file(dict(weights), str(directory / "model.safetensors"), metadata={"format": "pt"})
