"""How long the processes of taas wait for each other, and how often they look, in seconds.

The table runs from short to long. A process that waits for another one waits longer than that one
may take: an agent ends its ranks before its supervisor takes it for stuck, and a supervisor answers
before the person at the keyboard takes it for stuck.
"""

# A thread that waits may use so much processor time: the clock's grain, and a share of its time.
CLOCK_GRAIN = 0.02  # about the grain in which processor time is counted
TURN = 0.02  # for the supervisor to send agents messages; then it reads others
IDLE_SHARE = 0.05  # of a second in each second: a store, for one, polls
TICK = 0.05  # between two looks of an agent at its jobs: their output, and what is due
ASK_AGAIN = 0.1  # until a rank's main thread is asked again for what its agent wants of it
SPARES_APART = 0.1  # from one spare to the next: they are made while the user goes on working
SPARES_REST = 0.1  # after a run, so that the next cell, or the end of everything, comes first
STILL = 0.2  # of sleep in C code: such a main thread changes no names, so another thread packs them
TICK_OF_RUNS = 0.25  # between two looks of a supervisor at its runs; at the queue each second
HANG_LOOK_SHORTEST = 0.25  # between two looks whether a run makes progress, at least
SAME_END = 0.3  # for a rank in the cell after another one has failed: it may fail itself
# for a spare to end the import it is at, and to say whether it takes an order; else one is forked
TAKES_ORDER = 0.5
USAGE_FIRST = 0.5  # until ranks are looked at first: shorter runs show no use
TERM_TO_KILL = 0.6  # from a rank's SIGTERM to its SIGKILL
BREAK_OFF = 1.0  # of sleep after an interrupt: such a main thread seems to wait for other ranks
FORKSERVER_DIES = 1.0  # from the moment that its pipe is closed
NAMES_NOW = 1.5  # for rank 0's names if everything is to end now
FINISHING_LOOK = 1.5  # until an interrupted cell is looked at, and again
BEAT = 1.5  # between two signs of life that are asked for on a connection between hosts
USAGE_LOOK = 2.0  # between two looks at what ranks use
NOTICE = 2.0  # for a rank to say that it is at work on an interrupt
STACKS = 2.0  # for a rank to write its stacks
TREE_DIES = 2.0  # for processes that were killed to be dead
# A killed rank is to blame for errors of other ranks so shortly before its agent noticed its death.
DEATH_IS_THE_CAUSE = 2.0
CHOOSE_GPUS = 2.0  # for another supervisor to choose among this machine's GPUs
LAST_WORD = 2.0  # for an engine to say why a connection is gone
LEAVE_KEPT = 3.0  # for what libraries do at the exit of kept ranks
FAILURE = 3.5  # for the cell in a rank after another one has failed
# for an agent to end ranks now, rank 0's names included; an agent that sends them home is at work
END_RANKS = 4.0
SHOW_ALIVE = 5.0  # until an agent elsewhere shows the system again that it is not stopped
HANG_LOOK_OVERDUE = 5.0  # for a look at ranks; then another one takes its place
SILENCE = 6.0  # for a sign of life to come from another host
END_AGENT = 8.0  # for the end of an agent; then the system kills it
NAMES_BEGIN = 10.0  # for rank 0 to begin packing its names after a failure
FAILURE_OF_KEPT = 10.0  # for the cell in kept ranks after a failure: their names end with them
SUPERVISOR_ANSWERS = 10.0  # for a supervisor's answer to a visitor
ENDED_OTHERS = 10.0  # in a collective to which ranks that have ended the cell will not come
HANG_LOOK_LONGEST = 10.0  # between two looks whether a run makes progress, at most
RANK_EXITS = 15.0  # for a rank to leave after its cell has ended
# for a supervisor to end, and to give back VMs elsewhere; then the system kills it
END_SUPERVISOR = 15.0
AGENT_STOPPED = 20.0  # for an agent elsewhere to go on; then the system kills it, and so its ranks
# for names to be packed before a wait on GPUs is aborted: copies of a hung GPU never end
NAMES_AHEAD = 20.0
SPARES_LOOK = 20.0  # between two looks whether the machine has memory for spares
STORE_OPENS = 30.0  # for the store of a run on several machines to listen
CONNECT = 60.0  # for an agent elsewhere to reach its supervisor
IMPORTS_AHEAD = 60.0  # for a spare to import what the last rank imported
FILE_ON_DEMAND = 60.0  # for any part of a file to come that did not travel with the project
NAMES_PACKED = 60.0  # for rank 0 to pack its names after a failure
SPARES_IDLE = 15 * 60.0  # for the next run to come before its spares are ended
