"""Random layouts of tensors on random meshes, for hypothesis, and the elements that a part of one names."""

from math import prod

import torch
from hypothesis import strategies as st

from distribute.live.layout import Layout, Mesh, Part, rows_and_width


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, Mesh]:
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    shards = st.tuples(st.just("S"), st.integers(0, len(shape) - 1), st.integers(1, 4))
    placements = tuple(draw(st.one_of(st.just(("R",)), shards)) for _ in sizes)
    ranks = draw(st.permutations(range(prod(sizes))))
    return Layout(shape, placements), Mesh(tuple(ranks), sizes)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Layout, tuple[Mesh | None, ...]]:
    """A layout on meshes that differ from rank to rank: replicas of unlike shapes, and ranks that are in none."""
    layout, mesh = draw(layouts())
    meshes: list[Mesh | None] = [None] * len(mesh.ranks)
    for rank in mesh.ranks:
        meshes[rank] = mesh
    for _ in range(draw(st.integers(0, 2))):
        sizes = tuple(draw(st.integers(1, 2)) for _ in mesh.shape)
        ranks = range(len(meshes), len(meshes) + prod(sizes))
        meshes += [Mesh(tuple(ranks), sizes)] * prod(sizes)
    return layout, (*meshes, *[mesh] * draw(st.integers(0, 2)))


def numbers(layout: Layout, part: Part) -> torch.Tensor:
    """Element numbers that a part names, as its [rows, columns]."""
    whole = torch.arange(prod(layout.shape)).view(rows_and_width(layout.shape))
    rows = [row for run in part.rows for row in range(run.start, run.stop)]
    columns = [column for held in part.columns for column in held]
    return whole[rows][:, columns]
