"""Triton kernels for products of few rows with stored matrices.

A row has the same bits for every number of rows: tiles have `_ROWS` rows, and partial sums over the inputs are added in
an order that depends only on the matrix. Codes are stored in the order in which a thread multiplies
them, see `_by_column`.
"""

from __future__ import annotations

import triton
import triton.language as tl

_ROWS = tl.constexpr(16)  # rows of a tile, the least number of `tl.dot`
_BLOCK = tl.constexpr(64)  # inputs per scale of 4-bit codes
_HALF = tl.constexpr(32)
_NESTED_BLOCK = tl.constexpr(256)  # scales per scale of scales


@triton.jit
def _by_column(tile, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the tile `[OUTPUTS, COLUMNS]` in the order of the inputs."""
    parts = tl.reshape(tile, (OUTPUTS, 4, COLUMNS // 8, 2))
    return tl.reshape(tl.permute(parts, (0, 2, 1, 3)), (OUTPUTS, COLUMNS))


@triton.jit
def _decoded(pair, x_block, values, DECODE: tl.constexpr):
    """Return the values of the upper and of the lower codes in the dtype of `x_block`."""
    if DECODE == "":
        high = tl.load(values + (pair >> 4).to(tl.int32)).to(x_block.dtype)
        low = tl.load(values + (pair & 15).to(tl.int32)).to(x_block.dtype)
    else:
        high, low = tl.inline_asm_elementwise(
            DECODE, "=r,=r,=r,=r,r", [pair], (x_block.dtype, x_block.dtype), is_pure=True, pack=4
        )
    return high, low


@triton.jit
def _code_products(
    x_rows, stored_rows, values, present, stored, block, inputs,
    EVEN: tl.constexpr, OUTPUTS: tl.constexpr, DECODE: tl.constexpr,
):  # fmt: skip
    """Return the products `[OUTPUTS, _ROWS]` of a block of 4-bit codes without its scales."""
    half = tl.arange(0, _HALF)[None, :]
    column = block * _BLOCK + half
    if not EVEN:
        present &= column < inputs
        stored &= column < inputs
    pair = tl.load(stored_rows + block * _HALF + half, mask=stored, other=0)
    x_high = tl.load(x_rows + column, mask=present, other=0.0)
    x_low = tl.load(x_rows + _HALF + column, mask=present, other=0.0)
    high, low = _decoded(_by_column(pair, OUTPUTS, _HALF), x_high, values, DECODE)
    return tl.dot(low, tl.trans(x_low), tl.dot(high, tl.trans(x_high)))


@triton.jit
def _scales_of_scales(groups, starts, index, stored, block):
    """Return the first two scales of scales from `block` on, and the block from which the second one applies."""
    start = tl.load(starts + index, mask=stored, other=0)
    group = (start + block) // _NESTED_BLOCK
    factor = tl.load(groups + 2 * group, mask=stored, other=0.0)
    return factor, tl.load(groups + 2 * group + 2, mask=stored, other=0.0), (group + 1) * _NESTED_BLOCK - start


@triton.jit
def _stored_products(
    x_rows, stored_rows, present, stored, block, inputs, width, sums,
    CODED: tl.constexpr, EVEN: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """Add the products of a block of 8-bit codes (CODED), without their scales, or floats to `sums`."""
    column = block * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    if not EVEN:
        stored &= column < width
        present &= column < inputs
    weights = tl.load(stored_rows + column, mask=stored, other=0)
    x_block = tl.load(x_rows + column, mask=present, other=0.0)
    if CODED:
        weights = _by_column(weights, OUTPUTS, _BLOCK).to(x_block.dtype)
    return tl.dot(weights, tl.trans(x_block), sums)


@triton.jit(do_not_specialize=["rows", "splits"])
def product(
    x, weight, scales, levels, groups, starts, values, out, rows, outputs, inputs, width, stride, splits,
    FORM: tl.constexpr, NESTED: tl.constexpr, EVEN: tl.constexpr, OUTPUTS: tl.constexpr, BLOCKS: tl.constexpr,
    DECODE: tl.constexpr,
):  # fmt: skip
    """Write partial sums `out` `[splits, rows, outputs]` of `x` `[rows, inputs]` times the transposed matrix.

    FORM: 4-bit codes with scales by block, which are codes of `levels` if NESTED, 8-bit codes with a scale per output,
    or floats; `width`: stored inputs; EVEN: the steps over them have no remainder and `width` is `inputs`.
    """
    part = tl.program_id(1)
    index = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    stored = index < outputs
    row = tl.arange(0, _ROWS)
    present = (row < rows)[:, None]
    steps = tl.cdiv(width, _BLOCK * BLOCKS)
    share = tl.cdiv(steps, splits)
    x_rows = x + row[:, None].to(tl.int64) * stride
    stored_rows = weight + index[:, None].to(tl.int64) * (width // 2 if FORM == "CODE4" else width)
    sums = tl.zeros((OUTPUTS, _ROWS), tl.float32)
    if NESTED:
        factor, next_factor, change = _scales_of_scales(groups, starts, index, stored, part * share * BLOCKS)
        offset = tl.load(groups + 2 * (tl.load(starts + index, mask=stored, other=0) // _NESTED_BLOCK) + 1, mask=stored)
        following = tl.load(scales + part * share * outputs + index, mask=stored, other=0)
    for step in tl.range(part * share, min(part * share + share, steps)):
        if NESTED:
            word = following  # four scales; the next ones are loaded early
            following = tl.load(scales + (step + 1) * outputs + index, mask=stored & (index * 0 + step + 1 < steps))
        for i in tl.static_range(BLOCKS):
            block = step * BLOCKS + i
            if FORM == "CODE4":
                if NESTED:
                    level = tl.load(levels + (word >> (8 * i) & 255))
                    scale = level * tl.where(block < change, factor, next_factor) + offset
                else:
                    inside = stored & (index * 0 + block * _BLOCK < inputs)
                    scale = tl.load(scales + block * outputs + index, mask=inside, other=0.0)
                products = _code_products(
                    x_rows, stored_rows, values, present, stored[:, None], block, inputs, EVEN, OUTPUTS, DECODE
                )
                sums += products * scale[:, None]
            else:
                sums = _stored_products(
                    x_rows, stored_rows, present, stored[:, None], block, inputs, width, sums,
                    FORM == "INT8", EVEN, OUTPUTS,
                )  # fmt: skip
    if FORM == "INT8":
        sums *= tl.load(scales + index, mask=stored, other=0.0)[:, None]
    target = out + part * rows * outputs + row[None, :] * outputs + index[:, None]
    tl.store(target, sums, mask=(row < rows)[None, :] & stored[:, None])


@triton.jit(do_not_specialize=["rows"])
def total(partial, bias, out, rows, outputs, splits, BIASED: tl.constexpr, WIDTH: tl.constexpr):
    """Add the partial sums of `product`, and a bias."""
    row = tl.program_id(1)
    index = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    stored = index < outputs
    sums = tl.zeros((WIDTH,), tl.float32)
    for part in range(splits):
        sums += tl.load(partial + (part * rows + row) * outputs + index, mask=stored, other=0.0)
    if BIASED:
        sums += tl.load(bias + index, mask=stored, other=0.0).to(tl.float32)
    tl.store(out + row * outputs + index, sums.to(out.dtype.element_ty), mask=stored)


@triton.jit
def expand(
    weight, scales, levels, groups, starts, values, out, outputs, inputs, width,
    CODES: tl.constexpr, NESTED: tl.constexpr,
):  # fmt: skip
    """Write a block of inputs of the matrix `out` `[outputs, inputs]`; CODES: 4-bit codes, otherwise 8-bit codes."""
    index = tl.program_id(0) * _ROWS + tl.arange(0, _ROWS)
    block = tl.program_id(1)
    stored = index < outputs
    target = out + index[:, None].to(tl.int64) * inputs + block * _BLOCK
    if CODES:
        place = tl.arange(0, _HALF)[None, :]
        column = place // 2 % 4 * 8 + place // 8 * 2 + place % 2
        codes = weight + index[:, None].to(tl.int64) * (width // 2) + block * _HALF
        pair = tl.load(codes + place, mask=stored[:, None], other=0).to(tl.int32)
        if NESTED:
            group = (tl.load(starts + index, mask=stored, other=0) + block) // _NESTED_BLOCK
            factor = tl.load(groups + 2 * group, mask=stored, other=0.0)
            offset = tl.load(groups + 2 * group + 1, mask=stored, other=0.0)
            word = tl.load(scales + block // 4 * outputs + index, mask=stored, other=0)
            scale = tl.load(levels + (word >> block % 4 * 8 & 255)) * factor + offset
        else:
            scale = tl.load(scales + block * outputs + index, mask=stored, other=0.0)
        high = tl.load(values + (pair >> 4)) * scale[:, None]
        low = tl.load(values + (pair & 15)) * scale[:, None]
        tl.store(target + column, high.to(out.dtype.element_ty), mask=stored[:, None])
        tl.store(target + _HALF + column, low.to(out.dtype.element_ty), mask=stored[:, None])
    else:
        place = tl.arange(0, _BLOCK)[None, :]
        column = place // 2 % 8 * 8 + place // 16 * 2 + place % 2
        codes = weight + index[:, None].to(tl.int64) * width + block * _BLOCK
        code = tl.load(codes + place, mask=stored[:, None], other=0).to(tl.float32)
        scale = tl.load(scales + index, mask=stored, other=0.0)[:, None]
        inside = stored[:, None] & (block * _BLOCK + column < inputs)
        tl.store(target + column, (code * scale).to(out.dtype.element_ty), mask=inside)
