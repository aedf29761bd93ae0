"""Rows and vocabulary cut over devices: every result is that of one device, bit for bit."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rows
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmask import History, Sample, SamplingBatch, SamplingParams, sample

NUM_ROWS = 24
# 1003 columns do not divide by anything here; 1024 divide into whole bytes. The last columns are no ids.
VOCABULARIES = {"slices end within a byte": (1000, 1003), "slices of whole bytes": (1024, 1024)}


def mesh_of(num_rows: int, num_columns: int) -> Mesh:
    devices = np.array(jax.devices()[: num_rows * num_columns])
    return Mesh(devices.reshape(num_rows, num_columns), ("data", "tensor"))


@functools.cache
def problem(vocab_size: int, num_columns: int) -> tuple[jax.Array, SamplingBatch, History]:
    """Adversarial rows with every filter setting, and edits of every kind in a third of them."""
    rng = np.random.default_rng(vocab_size)
    logits = rows.adversarial(rng, NUM_ROWS, num_columns)
    grid = rows.filter_grid(vocab_size)
    settings = [grid[i] for i in rng.permutation(len(grid))[:NUM_ROWS]]
    for row in range(0, NUM_ROWS, 3):
        ids = [int(i) for i in rng.permutation(vocab_size)[:40]]
        settings[row] = dataclasses.replace(
            settings[row],
            logit_bias=dict.fromkeys(ids[:5], 3.0),
            repetition_penalty=1.3,
            frequency_penalty=0.5,
            presence_penalty=-0.25,
            min_tokens=8,
            stop_token_ids=ids[5:8],
            bad_words=[[ids[8], ids[9]], [ids[10]]],
            allowed_token_ids=ids if row % 2 else None,
        )
    batch = rows.with_seeds(SamplingBatch.from_params(settings, vocab_size=vocab_size, eos_token_ids=[3]))
    # Whether bits come along is static: said here, it does not depend on what a test sees of the values.
    batch = dataclasses.replace(batch, support_bound=vocab_size)
    lists = [[int(i) for i in rng.integers(0, vocab_size, 6)] for _ in range(NUM_ROWS)]
    prompts, outputs = [ids[:3] for ids in lists], [ids[3:] for ids in lists]
    return jnp.asarray(logits), batch, History.from_lists(prompts, outputs, batch)


OPTIONS = {"step": 3, "width": 8, "num_logprobs": 4, "return_support_logprobs": True}


@functools.cache
def on_one_device(vocab_size: int, num_columns: int, mode: str = "processed_logprobs") -> Sample:
    logits, batch, history = problem(vocab_size, num_columns)
    return sample(logits, batch, history=history, logprobs_mode=mode, **OPTIONS)


def assert_same(drawn: Sample, expected: Sample) -> None:
    """No difference at all, with the name of what differs; subnormal numbers, which XLA may flush, and -0 are 0."""

    def plain(leaf):
        leaf = np.asarray(leaf)
        return np.where(np.abs(leaf) < np.finfo(np.float32).tiny, 0, leaf) if leaf.dtype == np.float32 else leaf

    pairs = zip(jax.tree_util.tree_leaves_with_path(drawn), jax.tree.leaves(expected), strict=True)
    wrong = [jax.tree_util.keystr(path) for (path, one), other in pairs if not np.array_equal(plain(one), plain(other))]
    assert not wrong


COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter", "collective-broadcast")


def collective_sizes(text: str) -> list[int]:
    """Elements of every result of every collective in a compiled program, tuples included."""
    lines = re.findall(rf"= (.*?) (?:{'|'.join(COLLECTIVES)})(?:-start)?\(", text)
    shapes = [shape for line in lines for shape in re.findall(r"\w+\[([\d,]*)\]", line)]
    return [int(np.prod([int(size) for size in shape.split(",") if size])) for shape in shapes]


SLOW = pytest.mark.slow
# How the sharding is said or found; the bits of cut rows and columns under XLA's usual flags are asked for beside it.
UNOPTIMIZED = pytest.mark.unoptimized
WITHIN, BYTES = VOCABULARIES
# Rows, slices of the vocabulary, how the slices end, and what is reported: tokens, supports and bits are the same in
# every mode, so no mode needs a cut of its own; raw logits are the first half of raw log-probabilities. Every program
# takes seconds to compile: 1, 2, 4 and 8 pieces of rows and of the vocabulary and both ends of slices come up here or
# below, not each with each.
CUTS = [
    (2, 4, WITHIN, "processed_logprobs"),
    pytest.param(1, 8, WITHIN, "raw_logprobs", marks=SLOW),
    pytest.param(8, 1, BYTES, "processed_logits", marks=SLOW),
]


@pytest.mark.parametrize(("num_rows", "num_columns", "vocabulary", "mode"), CUTS)
def test_every_cut_gives_what_one_device_gives(num_rows, num_columns, vocabulary, mode):
    """P28, P75: under jit on a mesh; tokens, supports, bits, log-probs, ranks and top tokens."""
    sizes = VOCABULARIES[vocabulary]
    logits, batch, history = problem(*sizes)
    options = {"sharding": NamedSharding(mesh_of(num_rows, num_columns), P("data", "tensor")), "logprobs_mode": mode}
    leaves, tree = jax.tree.flatten((logits, batch, history))

    @jax.jit
    def run(*leaves):
        logits, batch, history = jax.tree.unflatten(tree, leaves)
        return sample(logits, batch, history=history, **options, **OPTIONS)

    expected = on_one_device(*sizes, mode)
    assert expected.support.packed is not None
    program = run.lower(*leaves).compile()
    drawn = program(*leaves)
    assert_same(drawn, expected)
    # Logits do not cross: a block of rows is more than anything that does, also where slices end within a byte.
    assert max(collective_sizes(program.as_text()), default=0) < NUM_ROWS // num_rows * logits.shape[1]
    # Both paths were taken, and rows without a token are among them.
    counts = np.asarray(drawn.support.counts)
    assert (counts > 48).any()
    assert ((counts > 0) & (counts <= 8)).any()
    assert not np.asarray(drawn.is_valid).all()


@UNOPTIMIZED
@SLOW
def test_placed_arrays_say_themselves_how_they_lie():
    """Outside of jit nothing has to be said: here of rows or columns over several axes, on the meshes below of both."""
    sizes = VOCABULARIES["slices of whole bytes"]
    logits, batch, history = problem(*sizes)
    mesh = mesh_of(2, 4)
    for spec in (P(("data", "tensor")), P(None, ("tensor", "data"))):
        placed = jax.device_put(logits, NamedSharding(mesh, spec))
        assert_same(sample(placed, batch, history=history, **OPTIONS), on_one_device(*sizes))


@UNOPTIMIZED
def test_inside_shard_map():
    """Each device passes its own piece and names the axis of the vocabulary."""
    sizes = VOCABULARIES["slices of whole bytes"]
    logits, batch, history = problem(*sizes)

    def piece(logits, batch, history):
        return sample(logits, batch, history=history, sharding=P("data", "tensor"), **OPTIONS)

    run = jax.shard_map(
        piece,
        mesh=mesh_of(2, 4),
        in_specs=(P("data", "tensor"), P("data"), P("data")),
        out_specs=P("data"),
        check_vma=False,
    )
    assert_same(jax.jit(run)(logits, batch, history), on_one_device(*sizes))


@UNOPTIMIZED
@SLOW
def test_rows_alone_inside_shard_map_need_no_word():
    sizes = VOCABULARIES["slices of whole bytes"]
    logits, batch, history = problem(*sizes)
    run = jax.shard_map(
        lambda logits, batch, history: sample(logits, batch, history=history, **OPTIONS),
        mesh=mesh_of(8, 1),
        in_specs=P("data"),
        out_specs=P("data"),
        check_vma=False,
    )
    assert_same(jax.jit(run)(logits, batch, history), on_one_device(*sizes))


@UNOPTIMIZED
@SLOW
def test_rows_need_not_divide():
    """P28: a device that owns no row changes nothing: here three of eight."""
    num_rows = 5
    sizes = VOCABULARIES["slices of whole bytes"]
    logits, batch, history = jax.tree.map(lambda leaf: leaf[:num_rows], problem(*sizes))
    sharding = NamedSharding(mesh_of(8, 1), P("data", "tensor"))
    drawn = sample(logits, batch, history=history, sharding=sharding, **OPTIONS)
    expected = jax.tree.map(lambda leaf: leaf[:num_rows], on_one_device(*sizes))
    assert_same(drawn, expected)


@UNOPTIMIZED
@SLOW
def test_on_a_mesh_of_explicit_axes_the_sharding_is_seen():
    sizes = VOCABULARIES["slices of whole bytes"]
    logits, batch, history = problem(*sizes)
    axis_types = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=axis_types)
    with jax.set_mesh(mesh):
        placed = jax.device_put(logits, NamedSharding(mesh, P("data", "tensor")))
        run = jax.jit(lambda *arrays: sample(arrays[0], arrays[1], history=arrays[2], **OPTIONS))
        assert_same(run(placed, batch, history), on_one_device(*sizes))
        # The context's mesh is also what a bare PartitionSpec refers to.
        said = sample(placed, batch, history=history, sharding=P("data", "tensor"), **OPTIONS)
        assert_same(said, on_one_device(*sizes))


@UNOPTIMIZED
@SLOW
@pytest.mark.parametrize(
    ("sizes", "uses"),
    [
        ((2, 4), {"placed", "whole"}),
        ((1, 1), {"traced"}),
        ((8, 1), {"traced"}),
    ],
)
def test_meshes_as_make_mesh_makes_them(sizes, uses):
    """Axes are explicit by default, and no mesh needs to be in context; nor does anything have to be cut."""
    vocabulary = VOCABULARIES["slices of whole bytes"]
    logits, batch, history = problem(*vocabulary)
    mesh = jax.make_mesh(sizes, ("data", "tensor"), devices=jax.devices()[: sizes[0] * sizes[1]])
    placed = jax.device_put(logits, NamedSharding(mesh, P("data", "tensor")))
    expected = on_one_device(*vocabulary)
    if "placed" in uses:
        assert_same(sample(placed, batch, history=history, **OPTIONS), expected)
    if "traced" in uses:
        run = jax.jit(lambda logits: sample(logits, batch, history=history, **OPTIONS).token_ids)
        np.testing.assert_array_equal(run(placed), expected.token_ids)
    if "whole" in uses:
        with jax.set_mesh(mesh):
            # Whole logits beside settings that are cut.
            spread = jax.device_put(batch, NamedSharding(mesh, P("data")))
            whole = jax.device_put(logits, NamedSharding(mesh, P()))
            drawn = sample(whole, spread, history=history, **OPTIONS)
            np.testing.assert_array_equal(drawn.token_ids, expected.token_ids)


@SLOW
def test_logits_never_cross_devices():
    """What crosses is small: candidates, and the packed kept set of one row at a time; with edits."""
    V, num_slices, width = 151_936, 8, 64
    params = SamplingParams(seed=1, top_p=0.9, repetition_penalty=1.1, logit_bias={3: 1.0}, bad_words=[[1, 2]])
    batch = SamplingBatch.from_params([params] * 4, vocab_size=V)
    history = History.from_lists([[1]] * 4, [[2]] * 4, batch)
    sharding = NamedSharding(mesh_of(1, num_slices), P("data", "tensor"))
    run = jax.jit(lambda logits: sample(logits, batch, step=0, history=history, width=width, sharding=sharding))
    sizes = collective_sizes(run.lower(jax.ShapeDtypeStruct((4, V), jnp.float32)).compile().as_text())
    assert 4 * num_slices * (2 * width + 32) in sizes
    assert max(sizes) <= max(4 * num_slices * (2 * width + 32), V // 8)


def test_the_reader_of_collectives_sees_tuples():
    text = "%a = (f32[4,8]{1,0}, s32[5]{0}) all-reduce(%b, %c), to_apply=%d\n%e = pred[7]{0} all-gather-start(%f)"
    assert collective_sizes(text) == [32, 5, 7]


def test_errors_name_the_axis():
    logits, batch, history = problem(1024, 1024)
    mesh = mesh_of(2, 4)
    with pytest.raises(ValueError, match=r"must name the axes of rows and columns, got .*'data'"):
        sample(logits, batch, history=history, sharding=NamedSharding(mesh, P("data", None, "tensor")), **OPTIONS)
    wrong = r"names mesh axes \['model'\]; the mesh has \['data', 'tensor'\]"
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=wrong):
        sample(logits, batch, history=history, sharding=P(None, "model"), **OPTIONS)
    with pytest.raises(ValueError, match=r"names mesh axes \['tensor'\]; the mesh has \[\]"):
        sample(logits, batch, history=history, sharding=P(None, "tensor"), **OPTIONS)
    with pytest.raises(ValueError, match=r"at least 1024 in 4 slices\] to fit the batch, got \(24, 128\)"):
        jax.shard_map(
            lambda piece: sample(piece, batch, history=history, sharding=P(None, "tensor"), **OPTIONS).token_ids,
            mesh=mesh,
            in_specs=P(None, "tensor"),
            out_specs=P(),
            check_vma=False,
        )(logits[:, :512])
