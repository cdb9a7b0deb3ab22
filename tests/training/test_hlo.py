"""What a program moves, against programs whose collectives and bytes are known."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from carope_jax.training._hlo import Collective, traffic

ROWS, WIDTH, TURNS = 64, 16, 5
LOCAL = ROWS // 8 * WIDTH * 4


def compiled_text(function, shape=(ROWS, WIDTH)):
    """A function of each device's rows and a replicated matrix, compiled for eight devices."""
    mesh = jax.make_mesh((8,), ("d",))
    rows, everywhere = PartitionSpec("d"), PartitionSpec()
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=(rows, everywhere), out_specs=rows, check_vma=False
    )
    arguments = [
        jax.ShapeDtypeStruct(size, jnp.float32, sharding=NamedSharding(mesh, where))
        for size, where in ((shape, rows), ((WIDTH, WIDTH), everywhere))
    ]
    return jax.jit(mapped).lower(*arguments).compile().as_text()


def looping(x, w):
    """An all-reduce in a loop, then one collective of each other kind."""

    def body(carried, _):
        return jax.lax.psum(carried @ w, "d"), None

    carried, _ = jax.lax.scan(body, x, None, length=TURNS)
    gathered = jax.lax.all_gather(carried, "d", tiled=True)
    moved = jax.lax.ppermute(carried, "d", [(i, (i + 1) % 8) for i in range(8)])
    return (
        gathered[:8] + moved + jax.lax.psum_scatter(carried, "d", tiled=True)
        + jax.lax.all_to_all(carried, "d", 0, 0, tiled=True)
    )  # fmt: skip


@pytest.fixture(scope="module")
def looping_text():
    return compiled_text(looping)


def test_collectives_are_counted_with_their_loops(looping_text):
    found = traffic(looping_text)
    assert found.loops == (TURNS,)
    assert found.collectives == {
        "all-reduce": Collective(TURNS, TURNS * LOCAL),
        "all-gather": Collective(1, 8 * LOCAL),
        "collective-permute": Collective(1, LOCAL),
        "reduce-scatter": Collective(1, LOCAL),
        "all-to-all": Collective(1, LOCAL),
    }


def test_turns_are_read_off_the_condition_where_the_compiler_does_not_tell(looping_text):
    untold = re.sub(r'"known_trip_count":\{[^}]*\},?', "", looping_text)
    assert untold != looping_text
    assert traffic(untold) == traffic(looping_text)


def test_a_loop_of_unknown_length_is_counted_once():
    def until_small(x, w):
        return jax.lax.while_loop(
            lambda x: x[0, 0] > 1, lambda x: jax.lax.pmean(x, "d") * w[0, 0], x
        )

    found = traffic(compiled_text(until_small))
    assert found.loops == (None,)
    assert found.collectives["all-reduce"] == Collective(1, LOCAL)


def test_bytes_of_a_sum_are_its_operands_and_result():
    def add(x, y):
        return x + y

    size = (256, 256)
    shape = jax.ShapeDtypeStruct(size, jnp.float32)
    text = jax.jit(add).lower(shape, shape).compile().as_text()
    assert traffic(text).hbm_bytes == 3 * 256 * 256 * 4


def test_a_loop_over_slices_reads_each_slice_once():
    """A scan takes one slice a turn of the stack: the stack's bytes in all, not a stack a turn."""

    def add_up(stack):
        def body(total, x):
            return total + x, None

        return jax.lax.scan(body, jnp.zeros_like(stack[0]), stack)[0]

    stack = jax.ShapeDtypeStruct((32, 128, 128), jnp.float32)
    text = jax.jit(add_up).lower(stack).compile().as_text()
    found, one = traffic(text), 128 * 128 * 4
    assert found.loops == (32,)
    assert 3 * 32 * one <= found.hbm_bytes < 6 * 32 * one


HAND_WRITTEN = """HloModule m, is_scheduled=true

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[]{:T(128)} parameter(0)
  %b = f32[]{:T(128)} parameter(1)
  ROOT %c = f32[]{:T(128)} add(%a, %b)
}

ENTRY %main (p: bf16[8,128], q: f32[4]) -> bf16[64,128] {
  %p = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)
  %q = f32[4]{0:T(128)} parameter(1)
  %near = f32[4]{0:T(128)S(1)} copy(%q)
  %r = (f32[4]{0:T(128)S(1)}, f32[4]{0:T(128)S(1)}) all-reduce(%near, %near), to_apply=%sum
  %s = (bf16[8,128]{1,0}, /*index=1*/bf16[64,128]{1,0}) all-gather-start(%p), dimensions={0}
  ROOT %d = bf16[64,128]{1,0} all-gather-done(%s)
}
"""


def test_tuples_tiles_memory_spaces_and_asynchronous_pairs():
    found = traffic(HAND_WRITTEN)
    assert found.collectives == {
        "all-reduce": Collective(1, 2 * 16),
        "all-gather": Collective(1, 64 * 128 * 2),
    }
    # S(1) is on-chip: the copy reads 16 bytes of the main memory, the all-reduce none.
    assert found.hbm_bytes == 16 + 8 * 128 * 2 + 64 * 128 * 2


def test_what_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        traffic("module @jit_f {}")
