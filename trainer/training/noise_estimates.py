"""Estimates of a gradient and its noise from batches of two sizes (McCandlish et al. 2018, appendix A.1)."""


def estimates(small: float, large: float, few: float, many: float) -> tuple[float, float]:
    """Squared norm of the true gradient, and variance of one token's gradient.

    `small` and `large` are the squared norms of the mean gradients of batches of `few` and `many` tokens.
    """
    return (many * large - few * small) / (many - few), (small - large) / (1 / few - 1 / many)
