"""Names of the quantisation recipes. Megatron derives classes from them at import; none can be used without a GPU."""


class Recipe:
    def __init__(self, *args, **kwargs):
        raise ValueError("FP8 and FP4 training need a GPU")


class DelayedScaling(Recipe):
    pass


class Float8CurrentScaling(Recipe):
    pass


class Float8BlockScaling(Recipe):
    pass


class MXFP8BlockScaling(Recipe):
    pass


class NVFP4BlockScaling(Recipe):
    pass
