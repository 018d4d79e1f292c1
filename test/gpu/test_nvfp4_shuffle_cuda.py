"""GPU tests of the kernels that shuffle NVFP4 weights. The result has the same bits as the engine's. The kernels work
in place and within their memory limits.
"""

from __future__ import annotations

import functools
import inspect
import logging
import types
import warnings

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton")
pytest.importorskip("flashinfer", reason="the layout is FlashInfer's: its index helpers are needed")

import nvfp4_layer  # noqa: E402
from nvfp4_layer import choose_trtllm, create, differences, load  # noqa: E402
from sglang_moe_patches.changes import fp4_weights  # noqa: E402
from sglang_moe_patches.changes.fp4_weights import shuffle  # noqa: E402
from sglang_moe_patches.core.patch import Patcher  # noqa: E402, probe

MIB = 1 << 20
KIMI_TP4 = (384, 7168, 512)
random_layer = functools.partial(nvfp4_layer.random_layer, device="cuda")

# experts, hidden, intermediate, is_gated
GRID = [
    (1, 128, 64, True),
    (3, 128, 128, False),
    (2, 256, 192, True),  # 384 rows: no power of two
    (5, 384, 320, True),  # 640 rows, row widths that no strip divides
    (7, 640, 384, False),
    (1, 2048, 768, True),
    (512, 128, 64, True),
    (16, 4096, 1536, True),  # 3072 rows: one program per multiprocessor
    (8, 4096, 192, True),
    (16, 7168, 256, True),
    (16, 7168, 512, True),
    (4, 7168, 2048, True),  # 4096 rows, strips of 32 bytes
    (2, 7168, 2048, False),
    (2, 512, 4096, True),  # 8192 rows, strips of 16 bytes
    (1, 256, 4608, True),  # 9216 rows: refused by the row kernel
    (1, 16384, 128, True),  # scale rows of 1 KiB
    (1, 32768, 128, True),  # scale rows of 2 KiB: refused by the interleave kernel
]


@pytest.fixture(autouse=True)
def fail_on_kernel_warning(caplog):
    """Fail the test if a Triton kernel cannot be compiled or launched. In this case the change itself only logs a
    warning and uses plain PyTorch.
    """
    shuffle._warn_no_kernel.cache_clear()
    with caplog.at_level(logging.WARNING, logger=shuffle.log.logger.name):
        yield
    # get_records, because caplog.records already has the records of this teardown.
    assert [r.message for r in caplog.get_records("call") if r.name == shuffle.log.logger.name] == []


@pytest.fixture(scope="module")
def engine():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        utils = pytest.importorskip("sglang.srt.layers.quantization.utils", exc_type=ImportError)
        from sglang.srt.layers.moe.moe_runner import flashinfer_trtllm as runner
    prepare = inspect.unwrap(utils.prepare_static_weights_for_trtllm_fp4_moe)
    return types.SimpleNamespace(utils=utils, runner=runner, prepare=prepare)


@pytest.mark.parametrize(("experts", "hidden", "intermediate", "is_gated"), GRID)
def test_kernels_and_the_plain_path_agree_with_the_engine(engine, monkeypatch, experts, hidden, intermediate, is_gated):
    layer = random_layer(experts, hidden, intermediate, is_gated, seed=1)
    sizes = (hidden, intermediate, experts, is_gated)
    expected = engine.prepare(*(t.clone() for t in layer), *sizes[:3], is_gated=is_gated)
    plain = tuple(t.clone() for t in layer)
    prepare = shuffle.prepare_static_weights_for_trtllm_fp4_moe
    with monkeypatch.context() as patch:
        patch.setattr(shuffle, "uses_triton", lambda device: False)
        assert differences(prepare(*plain, *sizes), expected) == []
    got = prepare(*layer, *sizes)
    assert differences(got, expected) == []
    for result, given in zip(got, (layer[0], layer[2], layer[1], layer[3]), strict=True):
        assert result.data_ptr() == given.data_ptr()


@pytest.mark.parametrize(("hidden", "intermediate"), [(7168, 512), (7168, 2048), (4096, 192)])
def test_kernels_that_work_in_place_have_no_race(hidden, intermediate):
    """No thread writes a row before other threads have read it. The kernels work in place, so a missing barrier between
    threads would be a race. Many programs run many times, and their results must equal an out-of-place gather.
    """
    w13, w2, s13, s2 = random_layer(64, hidden, intermediate)
    plan = shuffle.compute_row_permutations(hidden, intermediate, True)
    for _ in range(20):
        before = w13.clone(), w2.clone(), s13.view(torch.uint8).clone()
        shuffle.prepare_static_weights_for_trtllm_fp4_moe(w13, w2, s13, s2, hidden, intermediate, 64)
        assert torch.equal(w13, before[0][:, plan[0].rows.cuda()])
        assert torch.equal(w2, before[1][:, plan[2].rows.cuda()])
        gathered = before[2][:, plan[1].rows.cuda()]
        blocks = gathered.view(-1, gathered.shape[1] // 128, 4, 32, hidden // 64, 4).transpose(2, 4)
        assert torch.equal(s13.view(torch.uint8), blocks.reshape(gathered.shape))


def test_a_tensor_of_more_than_four_gib_is_permuted_correctly():
    experts, rows, row_bytes = 384, 4096, 3584
    if torch.cuda.mem_get_info()[0] < 8 << 30:
        pytest.skip("needs 8 GiB of free device memory")
    matrices = torch.zeros(experts, rows, row_bytes, dtype=torch.uint8, device="cuda")
    for expert in (0, experts // 2, experts - 1):
        matrices[expert] = torch.randint(0, 256, (rows, row_bytes), dtype=torch.uint8, device="cuda")
    permutation = shuffle.compute_row_permutations(7168, 2048, True)[0]
    expected = {e: matrices[e][permutation.rows.cuda()] for e in (0, experts // 2, experts - 1)}
    config = shuffle.choose_row_kernel_config(rows, row_bytes, False)
    shuffle.permute_rows_triton(matrices, permutation.rows.to("cuda", torch.int32), config)
    for expert, rows_expected in expected.items():
        assert torch.equal(matrices[expert], rows_expected)
    assert not matrices[1].any()


def test_unaligned_tensors_are_prepared_by_plain_pytorch():
    experts, hidden, intermediate = 2, 256, 128
    layer = random_layer(experts, hidden, intermediate)
    expected = shuffle.prepare_static_weights_for_trtllm_fp4_moe(
        *(t.cpu() for t in layer), hidden, intermediate, experts
    )
    shifted = []
    for tensor in layer:
        room = torch.empty(tensor.numel() + 3, dtype=torch.uint8, device="cuda")
        shifted.append(room[3:].view(tensor.shape).copy_(tensor.view(torch.uint8)))
    got = shuffle.prepare_static_weights_for_trtllm_fp4_moe(*shifted, hidden, intermediate, experts)
    assert differences(got, expected) == []


class _AllocationMeter:
    """Context manager that measures how much device memory its ``with`` block allocates, and in how many
    allocations.
    """

    def __enter__(self):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self._bytes = torch.cuda.memory_allocated()
        self._count = torch.cuda.memory_stats()["allocation.all.allocated"]
        return self

    def __exit__(self, *exc):
        torch.cuda.synchronize()
        self.peak = torch.cuda.max_memory_allocated() - self._bytes
        self.allocations = torch.cuda.memory_stats()["allocation.all.allocated"] - self._count


@pytest.mark.parametrize("kernels", [True, False])
def test_preparing_one_kimi_layer_stays_below_limits_of_memory_and_allocations(monkeypatch, kernels):
    experts, hidden, intermediate = KIMI_TP4
    layer = random_layer(experts, hidden, intermediate)
    monkeypatch.setattr(shuffle, "uses_triton", lambda device: kernels)
    shuffle.prepare_static_weights_for_trtllm_fp4_moe(*layer, hidden, intermediate, experts)  # compiles
    with _AllocationMeter() as used:
        shuffle.prepare_static_weights_for_trtllm_fp4_moe(*layer, hidden, intermediate, experts)
    assert used.peak <= 32 * MIB
    assert not kernels or used.allocations <= 16


def test_processing_loaded_weights_makes_no_second_copy_of_them(engine, monkeypatch):
    """The engine's own method prepares a Kimi-K2.5 layer at TP=4. It makes no second copy of the weights, and
    allocates only small placeholders.
    """
    from sglang.srt.layers.quantization import modelopt_quant as modelopt

    choose_trtllm(monkeypatch, modelopt)
    monkeypatch.setattr(fp4_weights, "_serves_by_marlin_alone", lambda: False)  # as on Blackwell
    experts, hidden, intermediate = KIMI_TP4
    used, states = {}, {}
    for name in ("stock", "ours"):
        patcher = Patcher()
        if name == "ours":
            fp4_weights.CHANGE.plan().install(patcher)
        try:
            with torch.device("cuda"):
                layer, method = create(modelopt, monkeypatch, experts, hidden, intermediate)
                load(layer, 0)
                method.process_weights_after_loading(layer)  # warm: compiled kernels, and FlashInfer's own module
                load(layer, 1)
                with _AllocationMeter() as measured:
                    method.process_weights_after_loading(layer)
        finally:
            patcher.undo()
        used[name] = measured.peak
        states[name] = {
            parameter: tensor.detach().flatten().view(torch.uint8).cpu()
            for parameter, tensor in layer.named_parameters()
            if not parameter.endswith("_blockscale_swizzled")
        }
        del layer, method
        torch.cuda.empty_cache()
    print(f"process_weights_after_loading, peak beyond the layer: {used}")
    assert states["stock"].keys() == states["ours"].keys()
    assert [name for name in states["stock"] if not torch.equal(states["stock"][name], states["ours"][name])] == []
    assert used["stock"] > 2_000 * MIB
    assert used["ours"] <= 64 * MIB


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
def test_a_layer_may_be_on_a_device_that_is_not_current():
    layer = tuple(t.to("cuda:1") for t in random_layer(4, 256, 128))
    expected = shuffle.prepare_static_weights_for_trtllm_fp4_moe(*(t.cpu() for t in layer), 256, 128, 4)
    with torch.cuda.device(0):
        got = shuffle.prepare_static_weights_for_trtllm_fp4_moe(*layer, 256, 128, 4)
    assert differences(got, expected) == []
