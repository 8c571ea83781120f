"""GPUs of ranks, as Horovod's programs choose them after ``init``. No GPU is needed:

TensorFlow's own settings are told of devices that are not there, and then that the
runtime has started.
"""

import pytest

from tw_horovod._state.group import pin_gpu
from tw_ranks import _tf_compat


@pytest.fixture
def make_settings(monkeypatch):
    """Makes settings of a process that sees some GPUs, before its runtime starts."""

    def make(count):
        names = ["CPU:0", *(f"GPU:{n}" for n in range(count))]
        devices = [f"/physical_device:{name}".encode() for name in names]
        module = _tf_compat.context
        with monkeypatch.context() as patch:
            found = module.pywrap_tfe
            patch.setattr(found, "TF_ListPhysicalDevices", lambda: devices)
            settings = module.Context()
            settings._initialize_physical_devices()
        return settings

    return make


def start(settings):
    settings._context_handle = object()


def choose_as_horovods_programs_do(settings, local_rank):
    gpus = settings.list_physical_devices("GPU")
    for gpu in gpus:
        settings.set_memory_growth(gpu, True)
    if gpus:
        settings.set_visible_devices(gpus[local_rank], "GPU")


@pytest.mark.parametrize("count", [0, 1, 2, 4])
@pytest.mark.parametrize("local_rank", [0, 1, 3])
def test_what_programs_choose_after_init_is_set_already(
    make_settings, count, local_rank
):
    if count and local_rank >= count:
        pytest.skip("there is no such GPU to choose")
    settings = make_settings(count)
    pin_gpu(settings, local_rank)
    start(settings)
    choose_as_horovods_programs_do(settings, local_rank)
    gpus = settings.list_physical_devices("GPU")
    assert settings.get_visible_devices("GPU") == gpus[local_rank : local_rank + 1]
    assert len(settings.get_visible_devices("CPU")) == 1
    assert all(settings.get_memory_growth(gpu) for gpu in gpus)


def test_a_launchers_choice_and_a_programs_own_before_init_stay(make_settings):
    settings = make_settings(1)
    pin_gpu(settings, 3)
    assert settings.get_visible_devices("GPU") == settings.list_physical_devices("GPU")
    settings = make_settings(3)
    gpus = settings.list_physical_devices("GPU")
    settings.set_visible_devices(gpus[2], "GPU")
    settings.set_memory_growth(gpus[2], False)
    pin_gpu(settings, 0)
    assert settings.get_visible_devices("GPU") == gpus[2:]
    growths = [settings.get_memory_growth(gpu) for gpu in gpus]
    assert growths == [None, None, False]
