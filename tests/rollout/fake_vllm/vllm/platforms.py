"""Where the stand-in pretends to be."""


class _Gpu:
    @staticmethod
    def is_cpu() -> bool:
        return False


current_platform = _Gpu()
