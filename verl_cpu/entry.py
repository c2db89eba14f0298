"""`verl.plugins` entry point of the CPU platform: does something only where `VERL_PLATFORM=cpu`.

verl loads this module while it is still importing, and logs its errors only at debug level. If registration fails, verl
stops with "Unknown platform 'cpu'".
"""

import gc
import os

if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
    # verl looks engines up by device; its FSDP engines are registered under "cuda" and run on any torch device.
    os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")
    # A run starts a dozen processes that import for seconds each, on few cores. Looking for garbage after every 700 new
    # objects, as Python does, takes a quarter of that.
    gc.set_threshold(50_000, 20, 20)
    from verl_cpu import megatron_shims, platform, verl_shims

    platform.register()
    verl_shims.register()
    megatron_shims.register()
