"""Training objectives."""

from ernie_jax.objectives.next_token import IGNORE, chunked_cross_entropy, token_losses

__all__ = ["IGNORE", "chunked_cross_entropy", "token_losses"]
