"""Estimates of a gradient and its noise, from batches of two sizes (McCandlish et al. 2018, appendix A.1)."""


def estimates(small: float, large: float, few: float, many: float) -> tuple[float, float]:
    """The square of the true gradient and the variance of one token's, from squares of gradients of few and many."""
    return (many * large - few * small) / (many - few), (small - large) / (1 / few - 1 / many)
