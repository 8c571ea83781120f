from ._owners import owned as owned
from ._owners import owners_of as owners_of
from ._owners import place_of as place_of
from ._parts import check_batch as check_batch
from ._parts import cut as cut
from ._parts import on_devices as on_devices
from ._parts import part_sizes as part_sizes
from ._parts import rows_of as rows_of
