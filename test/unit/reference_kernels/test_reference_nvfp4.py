"""Tests of quantizing to NVFP4. The expected code of a number comes from a search for the nearest of the format's
sixteen values."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang_moe_reference import nvfp4

VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
VALUES += [-v for v in VALUES]
# All finite non-negative E4M3 numbers, computed from the format: 4 exponent bits with bias 7, and 3 mantissa bits. The
# last code is NaN.
E4M3 = [m / 8 * 2.0**-6 for m in range(8)] + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]


def nearest_code(x: float) -> int:
    """Return the code of the nearest value, found by a search over all codes. A tie goes to the even code. The sign of
    zero is kept."""
    codes = range(8, 16) if math.copysign(1, x) < 0 else range(8)
    return min(codes, key=lambda code: (abs(VALUES[code] - x), code % 2))


def unpack(packed: torch.Tensor) -> torch.Tensor:
    codes = torch.empty(*packed.shape[:-1], packed.shape[-1] * 2, dtype=torch.uint8)
    codes[..., ::2], codes[..., 1::2] = packed % 16, packed // 16
    return codes


moderate = st.floats(min_value=-3000, max_value=3000, width=32)


class TestEncode:
    def test_every_bfloat16_number_gets_the_nearest_code(self) -> None:
        x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
        x = x[~x.isnan()]
        expected = torch.tensor([nearest_code(v) for v in x.clamp(-6, 6).tolist()], dtype=torch.uint8)
        assert torch.equal(nvfp4.encode_e2m1(x), expected)

    @pytest.mark.parametrize("sign", [1, -1])
    @pytest.mark.parametrize("code", range(7))
    def test_ties_go_to_the_even_code_and_their_neighbours_to_the_nearest(self, code: int, sign: int) -> None:
        tie = torch.tensor((VALUES[code] + VALUES[code + 1]) / 2)
        up, down = torch.nextafter(tie, torch.tensor(9.0)), torch.nextafter(tie, torch.tensor(0.0))
        got = nvfp4.encode_e2m1(sign * torch.stack((down, tie, up)))
        even = code + code % 2
        assert got.tolist() == [c + (8 if sign < 0 else 0) for c in (code, even, code + 1)]


class TestQuantize:
    @given(
        st.lists(moderate, min_size=32, max_size=32),
        st.floats(min_value=2.0**-10, max_value=2.0**10, width=32),
    )
    def test_scales_and_codes_follow_the_definition_of_nvfp4(self, xs: list[float], global_scale: float) -> None:
        """The test computes each scale and code in float64, by the definition of NVFP4. The tested code must return the
        nearest representable number. It computes in float32, so a value almost halfway between two numbers may be
        rounded to either number."""
        packed, block_scale = nvfp4.quantize(torch.tensor(xs), global_scale)
        assert packed.shape == (16,)
        assert packed.dtype == torch.uint8
        assert block_scale.shape == (2,)
        assert block_scale.dtype == torch.float8_e4m3fn
        codes = unpack(packed).tolist()
        for block in range(2):
            values = xs[16 * block : 16 * block + 16]
            wanted = min(max(map(abs, values)) / 6 * global_scale, 448.0)
            scale = block_scale[block].item()
            assert abs(scale - wanted) <= min(abs(s - wanted) for s in E4M3) + 1e-6 * wanted
            for code, x in zip(codes[16 * block : 16 * block + 16], values, strict=True):
                if scale == 0:
                    assert VALUES[code] == 0
                    continue
                target = max(-6.0, min(6.0, x * global_scale / scale))
                assert abs(VALUES[code] - target) <= min(abs(v - target) for v in VALUES) + 1e-6 * abs(target)

    def test_block_scale_saturates_instead_of_becoming_nan(self) -> None:
        packed, block_scale = nvfp4.quantize(torch.full((16,), 1e6), 1.0)
        assert block_scale.tolist() == [448.0]
        assert set(packed.tolist()) == {0x77}

    def test_leading_dimensions_are_kept_and_an_unaligned_last_dimension_is_refused(self) -> None:
        packed, block_scale = nvfp4.quantize(torch.randn(2, 3, 48), 1.0)
        assert packed.shape == (2, 3, 24)
        assert block_scale.shape == (2, 3, 3)
        with pytest.raises(ValueError, match="multiple of 16"):
            nvfp4.quantize(torch.randn(3, 40), 1.0)
        with pytest.raises(ValueError, match="one value"):
            nvfp4.quantize(torch.randn(3, 32), torch.ones(3))


class TestDequantize:
    def test_every_byte_and_scale_is_dequantized(self) -> None:
        packed = torch.arange(256, dtype=torch.uint8).reshape(32, 8)
        block_scale = torch.tensor(E4M3[-32:], dtype=torch.float32).to(torch.float8_e4m3fn).unsqueeze(-1)
        got = nvfp4.dequantize(packed, block_scale, 0.5)
        for row in range(32):
            expected = [VALUES[code] * E4M3[-32 + row] * 0.5 for code in unpack(packed[row]).tolist()]
            assert got[row].tolist() == expected


class TestGlobalScale:
    @given(st.lists(moderate, min_size=1, max_size=20))
    def test_the_global_scale_maps_the_largest_block_scale_to_the_largest_number(self, xs: list[float]) -> None:
        x = torch.tensor(xs)
        got = nvfp4.global_scale_for(x)
        assert got.shape == ()
        assert got.dtype == torch.float32
        if amax := max(map(abs, xs)):
            assert got.item() == pytest.approx(min(448 * 6 / amax, torch.finfo(torch.float32).max))
        else:
            assert got.item() == 1
