"""Collectives read from program text: bytes, groups in both notations, and what crosses between nodes."""

import pytest

from ernie_jax.testing import collectives

TEXT = """
  %a = (f32[1,2,3]{2,1,0}, f32[1,2,3]{2,1,0}) all-to-all(%x), replica_groups={{0,2},{1,3}}, metadata={op_name="jit(f)/x"}
  %b = u8[4,33]{1,0} all-gather(%x), channel_id=1, replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}
  %c = f8e4m3fn[4,10]{1,0} all-gather(%x), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}
  %d = bf16[6]{0} reduce-scatter(%x), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}
  %e = f32[] all-reduce(%x), replica_groups={}, to_apply=%add
"""


def test_bytes_and_groups():
    a, b, c, d, e = collectives(TEXT)
    assert [x.bytes for x in (a, b, c, d, e)] == [48, 132, 40, 12, 4]
    assert a.groups == ((0, 2), (1, 3)) and a.name == "jit(f)/x"
    assert b.groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert c.groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert e.groups == ()


def test_bytes_between_nodes():
    """Of nodes of two devices, {0, 1} and {2, 3}: each of four sends half of its 48 bytes to the other node, and so on."""
    a, b, _, d, e = collectives(TEXT)
    assert a.bytes_between(2) == 4 * 24 and a.bytes_between(4) == 0
    assert b.bytes_between(4) == 8 * 66
    # Each sends two devices of the other node what they keep.
    assert d.bytes_between(2) == 4 * 2 * 12
    with pytest.raises(ValueError, match="of a all-reduce; expected an all-to-all"):
        e.bytes_between(2)
