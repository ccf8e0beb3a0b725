"""Triton kernels for products of few rows with stored matrices.

A row has the same bits for every number of rows: tiles have `ROWS` rows, and partial sums over the inputs are added in
an order that depends only on the matrix. Codes are stored in the order in which a thread multiplies
them, see `_by_column`.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROWS = tl.constexpr(16)  # rows of a tile, the least number of `tl.dot`
BLOCK = tl.constexpr(64)  # inputs per scale of 4-bit codes
HALF = tl.constexpr(32)
NESTED_BLOCK = tl.constexpr(256)  # scales per scale of scales


@triton.jit
def _by_column(tile, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the tile `[OUTPUTS, COLUMNS]` in the order of the inputs."""
    parts = tl.reshape(tile, (OUTPUTS, 4, COLUMNS // 8, 2))
    return tl.reshape(tl.permute(parts, (0, 2, 1, 3)), (OUTPUTS, COLUMNS))


@triton.jit(do_not_specialize=["rows", "splits"])
def product(
    x,
    weight,
    scales,
    levels,
    groups,
    starts,
    values,
    out,
    rows,
    outputs,
    inputs,
    width,
    stride,
    splits,
    FORM: tl.constexpr,
    NESTED: tl.constexpr,
    EVEN: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    DECODE: tl.constexpr,
):
    """Write partial sums `out` `[splits, rows, outputs]` of `x` `[rows, inputs]` times the transposed matrix.

    `width`: stored inputs; EVEN: the steps over them have no remainder and `width` is `inputs`.
    """
    part = tl.program_id(1)
    index = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    stored = index < outputs
    row = tl.arange(0, ROWS)
    present = row < rows
    steps = tl.cdiv(width, BLOCK * BLOCKS)
    share = tl.cdiv(steps, splits)
    x_rows = x + row[:, None].to(tl.int64) * stride
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    if FORM == "CODE4":
        codes = weight + index[:, None].to(tl.int64) * (width // 2)
    else:
        codes = weight + index[:, None].to(tl.int64) * width
    column, half = tl.arange(0, BLOCK)[None, :], tl.arange(0, HALF)[None, :]
    if NESTED:
        start = tl.load(starts + index, mask=stored, other=0)
        group = (start + part * share * BLOCKS) // NESTED_BLOCK
        next_group = (group + 1) * NESTED_BLOCK - start
        factor = tl.load(groups + 2 * group, mask=stored, other=0.0)
        next_factor = tl.load(groups + 2 * group + 2, mask=stored, other=0.0)
        offset = tl.load(groups + 2 * group + 1, mask=stored, other=0.0)
        following = tl.load(scales + part * share * outputs + index, mask=stored, other=0)
    for step in tl.range(part * share, min(part * share + share, steps)):
        if NESTED:
            word = following
            following = tl.load(
                scales + (step + 1) * outputs + index, mask=stored & (0 * index + step + 1 < steps), other=0
            )
        for i in tl.static_range(BLOCKS):
            block = step * BLOCKS + i
            first = block * BLOCK
            stored_block, present_block = stored[:, None], present[:, None]
            if FORM == "CODE4":
                if not EVEN:
                    stored_block &= first + half < width
                    present_block &= first + half < width
                pair = tl.load(codes + block * HALF + half, mask=stored_block, other=0)
                x_high = tl.load(x_rows + first + half, mask=present_block, other=0.0)
                x_low = tl.load(x_rows + first + HALF + half, mask=present_block, other=0.0)
                if NESTED:
                    nested = tl.where(block < next_group, factor, next_factor)
                    scale = tl.load(levels + (word >> (8 * i) & 255)) * nested + offset
                else:
                    scale = tl.load(
                        scales + block * outputs + index, mask=stored & (0 * index + first < width), other=0.0
                    )
                pair = _by_column(pair, OUTPUTS, HALF)
                if DECODE == "":
                    high = tl.load(values + (pair >> 4).to(tl.int32)).to(x.dtype.element_ty)
                    low = tl.load(values + (pair & 15).to(tl.int32)).to(x.dtype.element_ty)
                else:
                    high, low = tl.inline_asm_elementwise(
                        DECODE, "=r,=r,=r,=r,r", [pair], (x.dtype.element_ty, x.dtype.element_ty), is_pure=True, pack=4
                    )
                sums += tl.dot(low, tl.trans(x_low), tl.dot(high, tl.trans(x_high))) * scale[:, None]
            else:
                if not EVEN:
                    stored_block &= first + column < width
                    present_block &= first + column < inputs
                chosen = tl.load(codes + first + column, mask=stored_block, other=0)
                x_block = tl.load(x_rows + first + column, mask=present_block, other=0.0)
                if FORM == "INT8":
                    chosen = _by_column(chosen, OUTPUTS, BLOCK).to(x.dtype.element_ty)
                sums = tl.dot(chosen, tl.trans(x_block), sums)
    if FORM == "INT8":
        scale = tl.load(scales + index, mask=stored, other=0.0)
        sums *= scale[:, None]
    target = out + part * rows * outputs
    tl.store(target + row[None, :] * outputs + index[:, None], sums, mask=present[None, :] & stored[:, None])


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
    weight,
    scales,
    levels,
    groups,
    starts,
    values,
    out,
    outputs,
    inputs,
    width,
    FORM: tl.constexpr,
    NESTED: tl.constexpr,
):
    """Write a block of inputs of the matrix `out` `[outputs, inputs]`."""
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(1)
    stored = index < outputs
    target = out + index[:, None].to(tl.int64) * inputs + block * BLOCK
    if FORM == "CODE4":
        place = tl.arange(0, HALF)[None, :]
        column = place // 2 % 4 * 8 + place // 8 * 2 + place % 2
        codes = weight + index[:, None].to(tl.int64) * (width // 2) + block * HALF
        pair = tl.load(codes + place, mask=stored[:, None], other=0).to(tl.int32)
        if NESTED:
            group = (tl.load(starts + index, mask=stored, other=0) + block) // NESTED_BLOCK
            factor = tl.load(groups + 2 * group, mask=stored, other=0.0)
            offset = tl.load(groups + 2 * group + 1, mask=stored, other=0.0)
            word = tl.load(scales + block // 4 * outputs + index, mask=stored, other=0)
            scale = tl.load(levels + (word >> block % 4 * 8 & 255)) * factor + offset
        else:
            scale = tl.load(scales + block * outputs + index, mask=stored, other=0.0)
        high = tl.load(values + (pair >> 4)) * scale[:, None]
        low = tl.load(values + (pair & 15)) * scale[:, None]
        tl.store(target + column, high.to(out.dtype.element_ty), mask=stored[:, None])
        tl.store(target + HALF + column, low.to(out.dtype.element_ty), mask=stored[:, None])
    else:
        place = tl.arange(0, BLOCK)[None, :]
        column = place // 2 % 8 * 8 + place // 16 * 2 + place % 2
        codes = weight + index[:, None].to(tl.int64) * width + block * BLOCK
        code = tl.load(codes + place, mask=stored[:, None], other=0).to(tl.float32)
        scale = tl.load(scales + index, mask=stored, other=0.0)[:, None]
        inside = stored[:, None] & (block * BLOCK + column < inputs)
        tl.store(target + column, (code * scale).to(out.dtype.element_ty), mask=inside)
