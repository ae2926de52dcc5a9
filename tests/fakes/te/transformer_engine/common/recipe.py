import os


class ValidationError(ValueError):
    """pydantic's: the first line counts, the others say."""


class Recipe:
    def __init__(self):
        if os.environ.get("NVTE_BACKWARD_OVERRIDE", "dequantized") not in ("high_precision", "dequantized"):
            raise ValidationError(
                f"1 validation error for {type(self).__name__}\n  Assertion failed, NVTE_BACKWARD_OVERRIDE must be unset or "
                "one of: 'high_precision', 'dequantized'. [type=assertion_error]"
            )


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
