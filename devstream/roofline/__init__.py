"""Where the time goes, from first principles, and what would help.

ceilings = roofline.measure()  # this device's own, kept after the first time
print(roofline.diagnose(step, batch))  # compute-, memory- or overhead-bound, and what to do
"""

from devstream.roofline._diagnose import diagnose
from devstream.roofline._measure import cached, measure
from devstream.roofline.ceilings import Ceilings
from devstream.roofline.devices import DATASHEETS, Datasheet
from devstream.roofline.diagnosis import Diagnosis
from devstream.roofline.model import Counts, Prediction

__all__ = [
    "DATASHEETS",
    "Ceilings",
    "Counts",
    "Datasheet",
    "Diagnosis",
    "Prediction",
    "cached",
    "diagnose",
    "measure",
]
