"""The side channel: a connection from every rank to rank 0, for everything but tensors.

    rank 0                                       every rank, rank 0 too
    ------                                       ----------------------
    listens, admits by a key      <- prove ---   connects (``tw_launch._key``)
    (``tw_launch._reception``)    -- proved -->
                                  <- hello ---   introduces itself
    waits until all have joined   -- welcome ->  knows all addresses
    compares, assigns keys        <- agree ---   sends a collective's digest, waits
    asks two where they differ    -- describe -> describes it in full
    (Exchange)                    -- agreed -->  goes on, or raises
    forwards a description        -- followed -> follows a step that it lacks
    records progress              <- beat ----   reports a few times a second
    (Attendance)                  -- beat ---->  knows that rank 0 answers
    asks whether all are alive    -- report -->  reports at once
    finds ranks missing           -- missing ->  aborts its collectives, raises

TensorFlow's collectives end with errors that do not name a rank, or hang. The side
channel knows which ranks they wait for, whatever their state, as nothing here uses
TensorFlow. Messages are JSON objects, one per line (``tw_launch._channel``), and packed
if they are long (``_packing``).
"""
