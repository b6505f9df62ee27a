"""Run two branches of a model side by side, and join them with an event.

python examples/two_branches.py [DEVICE]
"""

import sys

import torch

import devstream


def main(device: str | None = None) -> float:
    spec = next(one for one in devstream.devices() if device is None or str(one.device).startswith(device))
    place = "cpu" if spec.device.type == "cpu" else spec.device
    x = torch.linspace(-1, 1, 1 << 16).to(place)
    main_stream = devstream.current_stream(spec.device)
    side, done = devstream.Stream(spec.device), devstream.Event(spec.device)

    side.wait_stream(main_stream)  # x was made there
    with devstream.stream(side):
        y = torch.tanh(3 * x)
        done.record()
    z = torch.exp(-x * x)  # runs beside the branch above

    main_stream.wait_event(done)  # without this the product may read y before it is there
    if devstream.Capability.RECORD_STREAM in devstream.capabilities(spec.device):
        devstream.record_stream(y, main_stream)  # y is the side stream's memory, and is read here
    return (y * z).square().mean().item()


if __name__ == "__main__":
    print(f"mean: {main(*sys.argv[1:]):.6f}")
