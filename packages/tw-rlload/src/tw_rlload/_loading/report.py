"""What a load did with the rows it was given."""

from dataclasses import dataclass

from tw_rlload._loading.plan import LoadPlan


@dataclass(frozen=True)
class LoadReport:
    """The outcome of one load, counted in rows and bytes.

    Attributes:
      rows_given: rows of the batch.
      rows_loaded: rows of the batch that reached a device.
      rows_dropped: the others.
      rows_padded: rows of weight zero that fill up the last steps.
      num_devices: K.
      rows_per_device: rows on each device, pads included.
      rows_per_device_step: rows of one step on each device.
      sequence_length: rows of a sequence; 1 without states.
      batch_offsets: what ``optimize`` takes: where each step starts.
      bytes_loaded: the batch on all devices together, pads included.
      bytes_resident: what the devices hold at most: the batch, once a stack.
    """

    rows_given: int
    rows_loaded: int
    rows_dropped: int
    rows_padded: int
    num_devices: int
    rows_per_device: int
    rows_per_device_step: int
    sequence_length: int
    batch_offsets: tuple[int, ...]
    bytes_loaded: int
    bytes_resident: int


def make_report(plan: LoadPlan, *, bytes_loaded: int, stacks: int) -> LoadReport:
    """Reads the report from a plan that was carried out."""
    return LoadReport(
        rows_given=plan.rows_given,
        rows_loaded=plan.rows_loaded,
        rows_dropped=plan.rows_dropped,
        rows_padded=plan.rows_padded,
        num_devices=plan.num_devices,
        rows_per_device=plan.rows_per_device,
        rows_per_device_step=plan.rows_per_device_step,
        sequence_length=plan.sequence_length,
        batch_offsets=tuple(plan.batch_offsets),
        bytes_loaded=bytes_loaded,
        bytes_resident=bytes_loaded * stacks,
    )
