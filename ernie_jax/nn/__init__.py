"""Layers: norm, rotary positions, attention, gated MLP, embedding; the dtype policy."""
