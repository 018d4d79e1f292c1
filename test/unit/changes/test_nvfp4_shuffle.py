"""Tests of the change fp4-weights. The change shuffles the rows of NVFP4 weights in place, with the same result as the
engine's function. If it cannot shuffle an input in place, it leaves the input unchanged. It also frees scales that
Marlin never reads.
"""

from __future__ import annotations

import inspect
import os
import random
import re
import subprocess
import sys
import threading
import types
import warnings

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("flashinfer", reason="the layout is FlashInfer's: its index helpers are needed")

from nvfp4_layer import RESULTS, Layer, create, differences, nvfp4_method, random_layer  # noqa: E402
from sglang_moe_patches.changes import fp4_weights  # noqa: E402
from sglang_moe_patches.changes.fp4_weights import shuffle  # noqa: E402
from sglang_moe_patches.core.engine import mentions  # noqa: E402
from sglang_moe_patches.core.patch import Status, probe  # noqa: E402

INPUT_NAMES = ("gemm1_weights", "gemm2_weights", "gemm1_scales_linear_fp4_bytes", "gemm2_scales_linear_fp4_bytes")


def interleave(scales):
    """Return a uint8 matrix [M, K] of block scales in the order of FlashInfer's ``nvfp4_block_scale_interleave``."""
    rows, columns = scales.shape
    return scales.view(rows // 128, 4, 32, columns // 4, 4).transpose(1, 3).reshape(-1)


@pytest.fixture(scope="module")
def engine():
    """The engine's modules that shuffle weights. The function ``interleave`` replaces the only FlashInfer kernel that
    they call.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        utils = pytest.importorskip(
            "sglang.srt.layers.quantization.utils", reason="needs the engine", exc_type=ImportError
        )
        import flashinfer
        from sglang.srt.layers.moe.moe_runner import flashinfer_trtllm as runner
        from sglang.srt.layers.quantization import modelopt_quant as modelopt
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flashinfer, "nvfp4_block_scale_interleave", interleave)
        yield types.SimpleNamespace(
            utils=utils,
            runner=runner,
            modelopt=modelopt,
            prepare=inspect.unwrap(utils.prepare_static_weights_for_trtllm_fp4_moe),
        )


@pytest.fixture
def patched_engine(engine, patcher):
    """The engine's modules that shuffle weights, after the change was applied to them."""
    fp4_weights.CHANGE.plan().install(patcher)
    return engine


def clone(tensors):
    return tuple(t.clone() for t in tensors)


def random_shapes(count, seed):
    """Yield random sizes of a layer: (experts, hidden, intermediate, is_gated). There are 1 to 512 experts. Half of the
    intermediate sizes are no multiple of the alignment, so that the engine pads them.
    """
    rng = random.Random(seed)
    for _ in range(count):
        is_gated = rng.random() < 0.6
        experts = rng.choice([1, 2, 3, 5, 8, 16]) if rng.random() < 0.95 else rng.choice([64, 160, 257, 384, 512])
        hidden = 128 * rng.randint(1, 4 if experts <= 16 else 1)
        unit = 64 if is_gated else 128
        intermediate = unit * rng.randint(1, 5 if experts <= 16 else 1)
        if rng.random() < 0.5:  # the engine pads to a multiple of 16 with a gate, and of 128 without
            intermediate -= rng.choice([2, 8, 14]) if is_gated else rng.randrange(16, 128, 16)
        yield experts, hidden, intermediate, is_gated


@pytest.mark.parametrize("chunk", range(13))
def test_random_shapes_are_shuffled_bit_for_bit_as_by_the_engine(engine, chunk):
    padded = 0
    for number, (experts, hidden, intermediate, is_gated) in enumerate(random_shapes(40, seed=chunk)):
        w13, w2, s13, s2 = random_layer(experts, hidden, intermediate, is_gated, seed=number)
        # Later releases also return an aligned hidden size (``_``). It equals ``hidden`` here.
        w13, s13, w2, s2, aligned, *_ = engine.runner._align_fp4_moe_weights(
            w13, s13, w2, s2, is_gated, 16 if is_gated else 128
        )
        padded += aligned != intermediate
        layer = (w13, w2, s13, s2)
        expected = engine.prepare(*clone(layer), hidden, aligned, experts, is_gated=is_gated)
        shuffled = shuffle.prepare_static_weights_for_trtllm_fp4_moe(
            *layer, hidden, aligned, experts, is_gated=is_gated
        )
        assert differences(shuffled, expected) == [], (experts, hidden, intermediate, is_gated)
        for result, tensor in zip(shuffled, (layer[0], layer[2], layer[1], layer[3]), strict=True):
            assert result.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
            assert result.data_ptr() == tensor.data_ptr()
    assert 0 < padded < 40


@pytest.mark.parametrize("which", range(4))
def test_comparison_sees_two_swapped_rows(engine, monkeypatch, which):
    hidden, intermediate, experts = 256, 128, 2
    layer = random_layer(experts, hidden, intermediate)
    expected = engine.prepare(*clone(layer), hidden, intermediate, experts)
    permutations = list(shuffle.compute_row_permutations(hidden, intermediate, True))
    rows = permutations[which].rows.clone()
    rows[[3, 5]] = rows[[5, 3]]
    permutations[which] = shuffle.RowPermutation(rows, shuffle.find_repeating_tile(rows))
    monkeypatch.setattr(shuffle, "compute_row_permutations", lambda *_: permutations)
    shuffled = shuffle.prepare_static_weights_for_trtllm_fp4_moe(*layer, hidden, intermediate, experts)
    assert differences(shuffled, expected) == [RESULTS[which]]


@pytest.mark.parametrize("scratch_bytes", [1, 1 << 10, 40_000, 1 << 20])
@pytest.mark.parametrize("is_gated", [True, False])
def test_any_scratch_size_gives_the_same_result_without_a_second_copy(engine, monkeypatch, scratch_bytes, is_gated):
    hidden, intermediate, experts = 384, 256, 5
    layer = random_layer(experts, hidden, intermediate, is_gated)
    expected = engine.prepare(*clone(layer), hidden, intermediate, experts, is_gated=is_gated)
    shuffle.compute_row_permutations(hidden, intermediate, is_gated)
    sizes, real_empty = [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: sizes.append(a[0]) or real_empty(*a, **k))
    monkeypatch.setattr(shuffle, "SCRATCH_BYTES", scratch_bytes)
    shuffled = shuffle.prepare_static_weights_for_trtllm_fp4_moe(*layer, hidden, intermediate, experts, is_gated)
    assert differences(shuffled, expected) == []
    assert 0 < max(sizes) <= max(scratch_bytes, 128 * hidden // 16)  # the scratch holds at least one tile


@pytest.mark.parametrize("weight_dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("scale_dtype", [torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    "given",
    [
        pytest.param(lambda t: t, id="tensors"),
        pytest.param(lambda t: t.view(-1, t.shape[-1]), id="leading dimensions flattened"),
        pytest.param(lambda t: torch.nn.Parameter(t, requires_grad=False), id="parameters"),
    ],
)
def test_dtypes_and_kinds_of_input_give_plain_tensors_of_bytes_and_scales(engine, weight_dtype, scale_dtype, given):
    w13, w2, s13, s2 = random_layer(2, 128, 64, scale_dtype=scale_dtype)
    layer = (w13.view(weight_dtype), w2.view(weight_dtype), s13, s2)
    expected = engine.prepare(*clone(layer), 128, 64, 2)
    shuffled = shuffle.prepare_static_weights_for_trtllm_fp4_moe(*map(given, layer), 128, 64, 2)
    assert differences(shuffled, expected) == []
    assert [(type(t), t.dtype) for t in shuffled] == [
        (torch.Tensor, torch.uint8),
        (torch.Tensor, torch.float8_e4m3fn),
    ] * 2
    assert not any(t.requires_grad for t in shuffled)


def _wrong_inputs():
    hidden, intermediate, experts = 256, 128, 2
    sizes = (hidden, intermediate, experts)
    good = random_layer(experts, hidden, intermediate)

    def replaced(index, tensor):
        return tuple(tensor if i == index else t.clone() for i, t in enumerate(good))

    for index, name in enumerate(INPUT_NAMES):
        tensor = good[index].view(torch.uint8)
        yield f"{name}: dtype", replaced(index, tensor.to(torch.int16)), sizes, name, "one-byte dtype"
        yield f"{name}: bool", replaced(index, tensor > 7), sizes, name, "one-byte dtype"
        yield f"{name}: columns", replaced(index, tensor[..., :-4].contiguous()), sizes, name, "must have shape"
        yield f"{name}: rows", replaced(index, tensor[:, :-128].contiguous()), sizes, name, "must have shape"
        yield f"{name}: transposed", replaced(index, tensor.mT.contiguous()), sizes, name, "must have shape"
        strided = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] * 2, dtype=torch.uint8)[..., ::2]
        yield f"{name}: strided", replaced(index, strided), sizes, name, "contiguous"
        expanded = tensor[:1].expand_as(tensor)
        yield f"{name}: expanded", replaced(index, expanded), sizes, name, "contiguous"
        yield f"{name}: device", replaced(index, tensor.to("meta")), sizes, "", "on the device of"
    yield "gemm1 rows", random_layer(2, 256, 32), (256, 32, 2), INPUT_NAMES[2], "multiple of 128"
    yield "hidden", random_layer(2, 192, 128), (192, 128, 2), INPUT_NAMES[3], "multiple of 128"
    yield "scale columns", random_layer(2, 256, 192 + 128 + 16), (256, 336, 2), INPUT_NAMES[2], "multiple of 128"
    yield "no experts", good, (hidden, intermediate, 0), "num_experts", "positive"
    yield "expert count", good, (hidden, intermediate, 3), INPUT_NAMES[0], "must have shape"


@pytest.mark.parametrize(
    ("layer", "sizes", "name", "rule"), [pytest.param(*case[1:], id=case[0]) for case in _wrong_inputs()]
)
def test_wrong_input_is_refused_and_nothing_touched(layer, sizes, name, rule):
    before = clone(layer)
    with pytest.raises(ValueError, match=rule) as error:
        shuffle.prepare_static_weights_for_trtllm_fp4_moe(*layer, *sizes)
    assert name in str(error.value)
    for tensor, copy in zip(layer, before, strict=True):
        if not tensor.is_meta:
            assert torch.equal(tensor.contiguous().view(torch.uint8), copy.contiguous().view(torch.uint8))


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("kind", ["sliced", "transposed", "expanded"])
def test_views_are_left_to_the_engines_own_function(kind, index):
    """If a weight or scale is not contiguous, the change cannot work in place. It must call the engine's own function
    with the unchanged tensors."""
    layer = list(random_layer(2, 256, 128))
    tensor = layer[index]
    views = {
        "sliced": lambda: torch.cat([tensor, tensor], -1)[..., : tensor.shape[-1]],
        "transposed": lambda: tensor.mT.contiguous().mT,
        "expanded": lambda: tensor[:1].expand_as(tensor),
    }
    layer[index] = views[kind]()
    before = clone(layer)
    calls = []
    wrapped = fp4_weights._wrap_prepare(lambda *arguments: calls.append(arguments) or "the engine's")
    assert wrapped(*layer, 256, 128, 2) == "the engine's"
    assert [one is other for one, other in zip(calls[0], layer, strict=False)] == [True] * 4
    for one, copy in zip(layer, before, strict=True):
        assert torch.equal(one.contiguous().view(torch.uint8), copy.contiguous().view(torch.uint8))


def test_half_a_block_of_scale_columns_is_refused(monkeypatch):
    # FlashInfer itself would raise an exception for these sizes, so the test disables its check.
    monkeypatch.setattr(shuffle, "compute_row_permutations", lambda *_: ())
    with pytest.raises(shuffle.NotInPlace, match="multiple of 128"):
        shuffle.prepare_static_weights_for_trtllm_fp4_moe(*random_layer(2, 256, 32), 256, 32, 2)
    # 160 columns have 2.5 groups of four scales. A layer of this size is refused for its rows first, so the test calls
    # the rule directly.
    assert "multiple of 4" in shuffle._find_layout_error(gemm1_rows=256, hidden_size=256, intermediate_size=160)
    assert shuffle._find_layout_error(gemm1_rows=384, hidden_size=256, intermediate_size=192) is None


def test_a_layout_that_is_no_permutation_goes_to_the_engine(monkeypatch):
    monkeypatch.setattr(shuffle, "compute_row_permutations", lambda *_: None)
    layer = random_layer(2, 128, 64)
    before, calls = clone(layer), []

    def engines_own(*args, **kwargs):
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(args, before, strict=False))
        calls.append((args[4:], kwargs))
        return "the engine's"

    assert fp4_weights._wrap_prepare(engines_own)(*layer, 128, 64, 2, is_gated=True) == "the engine's"
    assert calls == [((128, 64, 2), {"is_gated": True})]
    with pytest.raises(ValueError, match="no permutation"):
        shuffle.prepare_static_weights_for_trtllm_fp4_moe(*layer, 128, 64, 2)


def test_a_kernel_that_cannot_run_falls_back(engine, monkeypatch, caplog):
    """If a Triton kernel cannot be launched (here because the tensors are on the CPU), PyTorch operations must give the
    same result."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter runs the kernels on the CPU")
    monkeypatch.setattr(shuffle, "uses_triton", lambda device: True)
    shuffle._warn_no_kernel.cache_clear()
    layer = random_layer(2, 256, 128)
    expected = engine.prepare(*clone(layer), 256, 128, 2)
    shuffled = shuffle.prepare_static_weights_for_trtllm_fp4_moe(*layer, 256, 128, 2)
    assert differences(shuffled, expected) == []
    assert "no Triton kernel for the row permutation" in caplog.text
    assert "no Triton kernel for the interleave" in caplog.text


# --- The permutations and the launch parameters ----------------------------------------------------------------------


def test_closed_sets_of_rows_are_tiles_or_whole_experts():
    gated = shuffle.compute_row_permutations(7168, 512, True)
    assert [p.tile is None for p in gated] == [True, True, False, False]
    not_gated = shuffle.compute_row_permutations(7168, 512, False)
    assert [p.tile is None for p in not_gated] == [False] * 4
    for permutation in (*gated, *not_gated):
        if permutation.tile is not None:
            tiles = torch.arange(0, permutation.rows.numel(), 128)[:, None] + permutation.tile
            assert torch.equal(tiles.flatten(), permutation.rows)


def test_a_permutation_without_a_repeating_tile_is_not_tiled():
    rows = torch.arange(384)
    assert torch.equal(shuffle.find_repeating_tile(rows), torch.arange(128))
    rows[[130, 131]] = rows[[131, 130]]
    assert shuffle.find_repeating_tile(rows) is None
    assert shuffle.find_repeating_tile(torch.arange(192)) is None
    assert shuffle.find_repeating_tile(torch.arange(256).roll(128)) is None


@pytest.mark.parametrize("tiled", [True, False])
def test_row_kernel_fits_a_multiprocessor(tiled):
    for rows in range(128, 9216 + 1, 128):
        for row_bytes in (8, 16, 32, 96, 256, 448, 2048, 3584):
            config = shuffle.choose_row_kernel_config(rows, row_bytes, tiled)
            if config is None:
                assert not tiled
                assert rows > 8192
                continue
            block = shuffle._round_up_to_power_of_2(config.tile_rows) * config.strip_bytes
            assert block <= shuffle.MAX_PROGRAM_BYTES
            assert config.strip_bytes >= 16
            assert config.strip_bytes & (config.strip_bytes - 1) == 0
            assert (
                block <= config.num_warps * 32 * 256
            )  # at most 256 bytes (64 registers) a thread, so that none are spilled
    assert shuffle.choose_row_kernel_config(256, 30, tiled) is None


# --- the kernels themselves, without a GPU --------------------------------------------------------------------------

_INTERPRETED = """
import torch
from sglang_moe_patches.changes.fp4_weights import shuffle
torch.manual_seed(0)
for hidden, intermediate, is_gated in ((128, 64, True), (256, 192, True), (384, 128, False), (128, 320, True)):
    rows = (2 if is_gated else 1) * intermediate
    shapes = (rows, hidden // 2), (hidden, intermediate // 2), (rows, hidden // 16), (hidden, intermediate // 16)
    layer = [torch.randint(0, 256, (2, *shape), dtype=torch.uint8) for shape in shapes]
    shuffled = []
    for kernels in (False, True):
        shuffle.uses_triton = lambda device: kernels
        copies = [tensor.clone() for tensor in layer]
        shuffle.prepare_static_weights_for_trtllm_fp4_moe(*copies, hidden, intermediate, 2, is_gated)
        shuffled.append(copies)
    for which, (plain, by_kernels) in enumerate(zip(*shuffled)):
        assert torch.equal(plain, by_kernels), (hidden, intermediate, which)
assert shuffle._warn_no_kernel.cache_info().currsize == 0, "a kernel did not run"
narrow = shuffle.RowKernelConfig(384, 64, 4)  # numbers of rows and columns that are no powers of two
matrices = torch.randint(0, 256, (3, 384, 96), dtype=torch.uint8)
index = torch.randperm(384)
expected = matrices[:, index]
shuffle.permute_rows_triton(matrices, index.to(torch.int32), narrow)
assert torch.equal(matrices, expected)
print("kernels agree")
"""


def test_interpreted_kernels_write_the_same_bytes_as_the_plain_code():
    pytest.importorskip("triton")
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _INTERPRETED],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "kernels agree" in result.stdout


@pytest.mark.parametrize("kernel", ["rows", "rows with a rest", "interleave", "permute and interleave"])
def test_compiled_kernels_load_everything_before_a_barrier_and_store_after_it(kernel, tmp_path, monkeypatch):
    """All threads of a compiled program load their values before any thread stores a value in place."""
    triton = pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("interpreted kernels are not compiled")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    rows = {"ROW_WORDS": 896, "TILE_ROWS": 1024, "BLOCK_ROWS": 1024, "STRIP_WORDS": 16}
    function, constants, warps = {
        "rows": (shuffle._permute_rows_kernel, rows, 16),
        "rows with a rest": (shuffle._permute_rows_kernel, {**rows, "TILE_ROWS": 768}, 16),
        "interleave": (shuffle._interleave_tiles_kernel, {"ROW_WORDS": 112, "BLOCK_WORDS": 128, "PERMUTE": False}, 16),
        "permute and interleave": (
            shuffle._interleave_tiles_kernel,
            {"ROW_WORDS": 8, "BLOCK_WORDS": 8, "PERMUTE": True},
            4,
        ),
    }[kernel]
    names = function.arg_names
    source = ASTSource(
        fn=function,
        signature={name: "constexpr" if name in constants else "*i32" for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name not in constants},
    )
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}).asm["ptx"]
    loads = [m.start() for m in re.finditer(r"ld\.global", ptx)]
    stores = [m.start() for m in re.finditer(r"st\.global", ptx)]
    barriers = [m.start() for m in re.finditer(r"bar(?:rier)?\.(?:cta\.)?sync", ptx)]
    assert loads
    assert stores
    assert any(max(loads) < barrier < min(stores) for barrier in barriers)
    # Loads and stores must be 16 bytes wide to reach the speed of the memory.
    assert "ld.global.v4.b32" in ptx
    assert "st.global.v4.b32" in ptx
    assert "ld.global.nc" not in ptx  # a load through the read-only cache is wrong for memory that the kernel writes


# --- the wiring -----------------------------------------------------------------------------------------------------


def skip_without_placeholders(engine):
    method = engine.modelopt.ModelOptNvFp4FusedMoEMethod
    if mentions(method.create_weights, "enable_flashinfer_trtllm_moe"):
        pytest.skip("this engine release makes no placeholders for TRT-LLM itself (test/engine covers its layers)")


@pytest.mark.parametrize(
    ("owner", "attribute", "value", "words"),
    [
        ("utils", "prepare_static_weights_for_trtllm_fp4_moe", lambda a, b: None, "takes"),
        ("runner", "prepare_static_weights_for_trtllm_fp4_moe", lambda: None, "no longer looks"),
        ("runner", "align_fp4_moe_weights_for_flashinfer_trtllm", lambda layer: None, "no longer looks"),
        ("modelopt", "swizzle_blockscale", lambda scale, out: None, "takes"),
    ],
)
def test_an_engine_that_looks_different_is_refused(engine, monkeypatch, owner, attribute, value, words):
    if attribute == "swizzle_blockscale":
        skip_without_placeholders(engine)
    theirs = types.FunctionType(value.__code__, {"__name__": "sglang.of_another_release"}, attribute)
    monkeypatch.setattr(getattr(engine, owner), attribute, theirs, raising=False)
    plan = probe(fp4_weights.CHANGE)
    assert plan.status is Status.UNSUPPORTED
    assert words in plan.reason


def test_our_function_replaces_the_engines_in_modules_that_imported_it(patched_engine):
    ours = patched_engine.utils.prepare_static_weights_for_trtllm_fp4_moe
    assert ours is not patched_engine.prepare
    assert sys.modules[fp4_weights._COMPRESSED_TENSORS].prepare_static_weights_for_trtllm_fp4_moe is ours


@pytest.fixture
def require_placeholders(engine):
    skip_without_placeholders(engine)


@pytest.mark.usefixtures("require_placeholders")
@pytest.mark.parametrize("missing", [None, "reorder_rows_for_gated_act_gemm", "shuffle_matrix_sf_a"])
def test_placeholders_of_every_other_backend_are_untouched(patched_engine, monkeypatch, missing):
    if missing is not None:
        monkeypatch.setattr(patched_engine.modelopt, missing, None)
    layer, _ = create(patched_engine.modelopt, monkeypatch, trtllm=missing is not None)
    assert layer.w13_blockscale_swizzled.shape == layer.w13_weight_scale.shape
    assert layer.w2_blockscale_swizzled.shape == layer.w2_weight_scale.shape


@pytest.mark.usefixtures("require_placeholders")
def test_swizzle_blockscale_is_replaced_only_within_create_weights(patched_engine, monkeypatch):
    """The change replaces ``swizzle_blockscale`` only while ``create_weights`` runs, and only for the thread that runs
    it. Other threads and later calls must get the engine's result."""
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, *a, **k: self)
    scale = random_layer(1, 128, 64)[2]
    expected = interleave(scale[0].view(torch.uint8)).view(1, 128, 8)
    seen = []
    real = patched_engine.modelopt.ModelWeightParameter

    def create_parameter_while_another_thread_swizzles(**kwargs):
        thread = threading.Thread(target=lambda: seen.append(patched_engine.modelopt.swizzle_blockscale(scale)))
        thread.start()
        thread.join()
        return real(**kwargs)

    monkeypatch.setattr(patched_engine.modelopt, "ModelWeightParameter", create_parameter_while_another_thread_swizzles)
    create(patched_engine.modelopt, monkeypatch, trtllm=True)
    seen.append(patched_engine.modelopt.swizzle_blockscale(scale))
    assert len(seen) > 2
    for swizzled in seen:
        assert torch.equal(swizzled.view(torch.uint8), expected)


@pytest.mark.usefixtures("require_placeholders")
def test_a_failing_create_weights_leaves_no_trace(patched_engine, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, *a, **k: self)
    method = nvfp4_method(patched_engine.modelopt, True)
    method.quant_config.is_checkpoint_nvfp4_serialized = False
    with pytest.raises(ValueError, match="dynamic quantization"):
        method.create_weights(Layer(1, True), 1, 128, 64, torch.bfloat16)
    scale = random_layer(1, 128, 64)[2]
    assert patched_engine.modelopt.swizzle_blockscale(scale).shape == scale.shape


# --- What Marlin never reads -----------------------------------------------------------------------------------------


def test_placeholders_have_one_byte_per_expert_and_the_same_dtype():
    layer = torch.nn.Module()
    scales = torch.ones(3, 128, 4).to(torch.float8_e4m3fn)
    layer.register_parameter("w13_blockscale_swizzled", torch.nn.Parameter(scales, requires_grad=False))
    layer.register_parameter("w2_blockscale_swizzled", None)
    layer.w2_weight_scale = other = torch.nn.Parameter(torch.ones(3, 4), requires_grad=False)
    assert fp4_weights.drop_swizzled_scales(layer) == 3 * 128 * 4 - 3
    # The placeholder is a parameter, because the engine's weight offloader looks it up by name.
    placeholder = dict(layer.named_parameters())["w13_blockscale_swizzled"]
    assert (placeholder.shape, placeholder.dtype, placeholder.requires_grad) == ((3, 1, 1), torch.float8_e4m3fn, False)
    assert layer.w2_blockscale_swizzled is None
    assert layer.w2_weight_scale is other
    assert fp4_weights.drop_swizzled_scales(layer) == 0
