"""Collectives read from program text: bytes, groups in both notations, and what crosses between nodes."""

from dataclasses import replace

import pytest

from ernie_jax.testing import collectives

TEXT = """
  %a = (f32[1,2,3]{2,1,0}, f32[1,2,3]{2,1,0}) all-to-all(%x), replica_groups={{0,2},{1,3}}, metadata={op_name="jit(f)/x"}
  %b = u8[4,33]{1,0} all-gather(%x), channel_id=1, replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}
  %c = f8e4m3fn[4,10]{1,0} all-gather(%x), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}
  %d = bf16[6]{0} reduce-scatter(%x), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}
  %f = s8[8]{0} all-gather(%x), replica_groups=mesh['data'=2,'expert'=2,'tensor'=2] {'expert'}, dimensions={0}
  %g = s8[8]{0} all-gather(%x), replica_groups=mesh['data'=2,'expert'=2,'tensor'=2] {'data','tensor'}, dimensions={0}
  %e = f32[] all-reduce(%x), replica_groups={}, to_apply=%add
"""


def test_bytes_and_groups():
    a, b, c, d, f, g, e = collectives(TEXT)
    assert [x.bytes for x in (a, b, c, d, e)] == [48, 132, 40, 12, 4]
    assert a.groups == ((0, 2), (1, 3)) and a.name == "jit(f)/x"
    assert b.groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert c.groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert f.groups == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert g.groups == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert e.groups == ()


def test_bytes_between_nodes():
    """Of nodes of two devices, {0, 1} and {2, 3}: each of four sends half of its 48 bytes to the other node, and so on."""
    a, b, _, d, *_, e = collectives(TEXT)
    assert a.bytes_between(2) == 4 * 24 and a.bytes_between(4) == 0
    assert b.bytes_between(4) == 8 * 66
    # Each sends two devices of the other node what they keep.
    assert d.bytes_between(2) == 4 * 2 * 12
    with pytest.raises(ValueError, match="of a all-reduce; expected an all-to-all"):
        e.bytes_between(2)
    with pytest.raises(ValueError, match="its groups are not listed"):
        replace(a, groups=()).bytes_between(2)


MORE = """
  %a = pred[3]{0} all-reduce(%x), replica_groups=mesh['a'=1,'b'=2,'c'=4], device_ids=([2,2,2]T(1,0,2)) {'b'}, to_apply=%add
  %b = (f32[2]{0:T(128)}, s4[3]{0}) all-reduce(%x, %y), replica_groups=mesh['a'=2,'b'=2], device_ids=(3,1,2,0) {'a'}, to_apply=%add
  %c = s8[8]{0} all-gather(%x), replica_groups=mesh['a'=8] {'a':(2)2}, dimensions={0}
  %d = (bf16[2]{0}, bf16[8]{0:T(8,128)(2,1)}) all-gather-start(%x), replica_groups={{0,1,2,3}}, dimensions={0}
  %e = bf16[8]{0} all-gather-done(%d)
  %f = (f32[4]{0}, f32[4]{0}, u32[], u32[]) collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}
  %g = ((f32[4]{0}, f32[4]{0}), (f32[2]{0}, f32[2]{0})) reduce-scatter-start(%x, %y), replica_groups={{0,1}}, dimensions={0}
  %h = (f32[4]{0}, f32[5]{0}) all-reduce-start(%x, %y), replica_groups={{0,1}}, to_apply=%add
"""


def test_reordered_meshes_narrow_types_and_begun_operations():
    a, b, c, d, f, g, h = collectives(MORE)
    assert a.groups == ((0, 2), (1, 3), (4, 6), (5, 7)) and a.bytes == 3
    assert b.groups == ((3, 2), (1, 0)) and b.parts == (("f32", 8), ("s4", 2))
    # Places 0..7 are (2 before, 2 taken, 2 behind): devices that differ by 2.
    assert c.groups == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert d.shapes == ((8,),) and d.parts == (("bf16", 16),)
    assert f.pairs == ((0, 1), (1, 0)) and f.bytes == 16
    assert g.bytes == 16 and h.bytes == 36
