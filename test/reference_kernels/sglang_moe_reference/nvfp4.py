"""Conversion of tensors to NVFP4 and back, in plain PyTorch, on any device. The functions follow the definition of
NVFP4.

A tensor in NVFP4 is stored as

* E2M1 codes, two to a byte, the first element in the low nibble. The sixteen codes are eight magnitudes and, with the
  high bit set, their negatives;
* one E4M3 block scale for every 16 consecutive elements of the last dimension;
* one float32 scale for the whole tensor. Quantization takes FlashInfer's ``global_scale``, the *multiplier* 448 * 6 /
  amax that makes the largest block scale the largest E4M3 number. Dequantization takes its inverse, which ModelOpt
  checkpoints store as ``weight_scale_2`` and ``input_scale``.

Source: NVIDIA's description of NVFP4 and the recipe of FlashInfer's ``fp4_quantize`` (``quantization_utils.cuh``,
``cvt_warp_fp16_to_fp4``). The device code uses approximate reciprocals; here they are exact, so values within a unit in
the last place of a rounding boundary may be rounded the other way.
"""

from functools import cache

import torch

BLOCK_SIZE = 16
"""Number of elements that share one block scale."""

E2M1_MAX = 6.0
E4M3_MAX = 448.0

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the E2M1 codes 0 to 7. Code 8 + i is the negative of code i."""


@cache
def _byte_values(device: torch.device) -> torch.Tensor:
    """Return the two E2M1 values in each of the 256 bytes, as float32 [256, 2]."""
    values = torch.tensor([*E2M1_MAGNITUDES, *(-v for v in E2M1_MAGNITUDES)], dtype=torch.float32)
    byte = torch.arange(256)
    return torch.stack((values[byte & 15], values[byte >> 4]), dim=-1).to(device)


@cache
def _rounding_boundaries(device: torch.device) -> torch.Tensor:
    """Return float32 [7], the upper boundaries of the codes 0 to 6: magnitude m gets code i if boundary[i - 1] < m <=
    boundary[i].

    Boundary i is the midpoint between the magnitudes of codes i and i + 1. The midpoint itself must be rounded to the
    even code. If i is odd, the boundary is therefore the next smaller float.
    """
    magnitudes = torch.tensor(E2M1_MAGNITUDES, dtype=torch.float32)
    midpoints = (magnitudes[:-1] + magnitudes[1:]) / 2
    below = torch.nextafter(midpoints, torch.zeros_like(midpoints))
    return torch.where(torch.arange(7) % 2 == 0, midpoints, below).to(device)


def _as_float32(value: torch.Tensor | float, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(value, dtype=torch.float32, device=device)


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Round numbers to the nearest E2M1 value, and return the codes. Ties go to the even code, and magnitudes above 6
    become 6.

    :param x: float tensor of any shape. NaN becomes the largest magnitude, as in the PTX conversion.
    :returns: uint8 tensor of the same shape, one code (0 to 15) per element.
    """
    x = x.float()
    magnitude = torch.bucketize(x.abs(), _rounding_boundaries(x.device), out_int32=True)
    return (magnitude + 8 * torch.signbit(x)).to(torch.uint8)


def quantize(x: torch.Tensor, global_scale: torch.Tensor | float) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a tensor to NVFP4.

    block_scale = e4m3(amax of the block / 6 * global_scale), value = e2m1(x * global_scale / block_scale). Both
    conversions saturate. If the scale of a block is zero, all its values are zero.

    :param x: float tensor [..., K], K a multiple of 16. The computation is in float32.
    :param global_scale: the multiplier, one float32 value, usually ``global_scale_for`` of the calibration data.
    :returns: packed: uint8 [..., K // 2], first element in the low nibble. block_scale: float8_e4m3fn [..., K // 16].
    :raises ValueError: K is not a multiple of 16, or global_scale is more than one value.
    """
    k = x.shape[-1]
    if k % BLOCK_SIZE:
        raise ValueError(f"NVFP4 needs a last dimension that is a multiple of {BLOCK_SIZE}, got {k}")
    global_scale = _as_float32(global_scale, x.device)
    if global_scale.numel() != 1:
        raise ValueError(f"global_scale must be one value, got shape {tuple(global_scale.shape)}")
    global_scale = global_scale.reshape(())
    blocks = x.float().unflatten(-1, (k // BLOCK_SIZE, BLOCK_SIZE))
    # The order of the operations is the device code's. PyTorch's cast to E4M3 does not saturate, so clamp first.
    wanted = global_scale * (blocks.abs().amax(-1) * (1 / E2M1_MAX))
    block_scale = wanted.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    decoded = block_scale.float()
    encode_scale = torch.where(decoded == 0, 0.0, 1 / (decoded * (1 / global_scale)))
    codes = encode_e2m1(blocks * encode_scale.unsqueeze(-1)).flatten(-2)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), block_scale


def decode(packed: torch.Tensor, block_scale: torch.Tensor) -> torch.Tensor:
    """Decode NVFP4 data without the whole-tensor scale: return e2m1 value * block_scale.

    The products are exact, because they have at most six significant bits.

    :param packed: uint8 [..., K // 2], first element in the low nibble.
    :param block_scale: float8_e4m3fn [..., K // 16] in linear (not swizzled) layout.
    :returns: float32 [..., K].
    """
    values = torch.embedding(_byte_values(packed.device), packed.int())  # [..., K // 2, 2]
    blocks = values.flatten(-2).unflatten(-1, (block_scale.shape[-1], BLOCK_SIZE))
    return blocks.mul_(block_scale.float().unsqueeze(-1)).flatten(-2)


def dequantize(packed: torch.Tensor, block_scale: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    """Compute the float32 tensor that NVFP4 data stand for: e2m1 value * block_scale * scale.

    :param packed: uint8 [..., K // 2], first element in the low nibble.
    :param block_scale: float8_e4m3fn [..., K // 16] in linear (not swizzled) layout.
    :param scale: the inverse of ``quantize``'s global_scale (ModelOpt's ``weight_scale_2``). It is one float32 value,
        or a tensor that broadcasts to [..., K], such as [experts, 1, 1].
    :returns: float32 [..., K].
    """
    return decode(packed, block_scale).mul_(_as_float32(scale, packed.device))


def global_scale_for(x: torch.Tensor) -> torch.Tensor:
    """Compute FlashInfer's multiplier for a tensor: 448 * 6 / amax, with which the largest block scale is E4M3's
    maximum.

    :param x: float tensor of any shape.
    :returns: float32 scalar, finite; 1 for a tensor of zeros.
    """
    amax = x.float().abs().amax()
    multiplier = (E4M3_MAX * E2M1_MAX / amax).clamp(max=torch.finfo(torch.float32).max)
    return torch.where(amax == 0, 1.0, multiplier)
