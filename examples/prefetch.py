"""Copy each batch to the device while the step before it runs.

python examples/prefetch.py [DEVICE]
"""

import sys

import torch

import devstream
from devstream import overlap

STEPS, ROWS, WIDTH = 20, 256, 512


def main(device: str | None = None) -> float:
    spec = next(one for one in devstream.devices() if device is None or str(one.device).startswith(device))
    place = "cpu" if spec.device.type == "cpu" else spec.device
    weights = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0)).to(place) / WIDTH**0.5
    batches = (torch.full((ROWS, WIDTH), float(step)) for step in range(STEPS))

    total = torch.zeros((), device=place)
    arriving = overlap.copy(next(batches), spec.device)
    while arriving is not None:
        batch, ready = arriving
        upcoming = next(batches, None)
        # Before this step is issued, so that the copy runs under it.
        arriving = None if upcoming is None else overlap.copy(upcoming, spec.device)
        ready.wait(devstream.current_stream(spec.device))  # the step waits for its batch; the host goes on
        total += (batch @ weights).square().mean()
    return total.item()


if __name__ == "__main__":
    print(f"sum of the means: {main(*sys.argv[1:]):.3f}")
