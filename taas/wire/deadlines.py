"""How long taas' processes wait for each other, and how often they look, in seconds: one table, from short to long.

Who waits for somebody waits longer than that one has: what an agent does at a rank's end is over
before its supervisor takes it for stuck, and this before the person at the keyboard takes the
supervisor for it.
"""

# so roughly processor time is counted; who waits may use that, and a share of its time:
CLOCK_GRAIN = 0.02
TURN = 0.02  # for the supervisor to tell agents something; then it hears others
IDLE_SHARE = 0.05  # of a second in each second: a store, for one, looks again and again
TICK = 0.05  # between two looks of an agent at its jobs: what they wrote, what is due
ASK_AGAIN = 0.1  # until a rank's main thread is asked again for what its agent wants of it
SPARES_APART = 0.1  # from one spare to the next: they are made beside what the user does
# after a run; first comes what follows it at once: the next cell, or the end of everything
SPARES_REST = 0.1
# of sleep in C code: such a main thread changes no names, and they are packed beside it
STILL = 0.2
# between two looks of a supervisor at its runs; at what waits for runs each second
TICK_OF_RUNS = 0.25
HANG_LOOK_SHORTEST = 0.25  # between two looks whether a run makes progress, at least
SAME_END = 0.3  # for a rank in the cell after another one has failed: it may fail itself
USAGE_FIRST = 0.5  # until ranks are looked at first: shorter runs show no use
TERM_TO_KILL = 0.6  # from a rank's SIGTERM to its SIGKILL
# of sleep after an interrupt: such a main thread waits for others, as far as can be seen
BREAK_OFF = 1.0
FORKSERVER_DIES = 1.0  # from the moment that what it held is closed
NAMES_NOW = 1.5  # for rank 0's names where all is to end now
FINISHING_LOOK = 1.5  # until an interrupted cell is looked at, and again
BEAT = 1.5  # between two signs of life that are asked for on a connection between hosts
USAGE_LOOK = 2.0  # between two looks at what ranks use
NOTICE = 2.0  # for a rank to say that it is at work on an interrupt
STACKS = 2.0  # for a rank to write its stacks
TREE_DIES = 2.0  # for processes that were killed to be dead
# a killed rank is to blame for what others met so shortly before its agent saw it
DEATH_IS_THE_CAUSE = 2.0
CHOOSE_GPUS = 2.0  # for another supervisor to choose among this machine's GPUs
LAST_WORD = 2.0  # for an engine to say why a connection is gone
LEAVE_KEPT = 3.0  # for what libraries do at the exit of kept ranks
FAILURE = 3.5  # for the cell in a rank after another one has failed
# for an agent to end ranks now, rank 0's names included; who sends something home is at work
END_RANKS = 4.0
SHOW_ALIVE = 5.0  # until an agent elsewhere shows the system again that it is not stopped
HANG_LOOK_OVERDUE = 5.0  # for a look at ranks; then another one takes its place
SILENCE = 6.0  # for a sign of life to come from another host
END_AGENT = 8.0  # for the end of an agent; then the system kills it
NAMES_BEGIN = 10.0  # for rank 0 to begin packing its names after a failure
# for the cell in ranks that stay after it: with one of them goes what only they have
FAILURE_OF_KEPT = 10.0
SUPERVISOR_ANSWERS = 10.0  # for a supervisor's answer to a visitor
ENDED_OTHERS = 10.0  # in a collective to which ranks that have ended the cell will not come
HANG_LOOK_LONGEST = 10.0  # between two looks whether a run makes progress, at most
RANK_EXITS = 15.0  # for a rank to leave after its cell has ended
# for the end of a supervisor, which gives VMs elsewhere back; then the system kills it
END_SUPERVISOR = 15.0
AGENT_STOPPED = 20.0  # for an agent elsewhere to go on; then the system kills it, and so its ranks
# for names to be packed before a wait on GPUs is aborted: copies of a hung GPU never end
NAMES_AHEAD = 20.0
SPARES_LOOK = 20.0  # between two looks whether the machine has memory for spares
STORE_OPENS = 30.0  # for the store of a run on several machines to listen
CONNECT = 60.0  # for an agent elsewhere to reach its supervisor
LATE_FILE = 60.0  # for any part of a file to come that did not travel with the project
NAMES_PACKED = 60.0  # for rank 0 to pack its names after a failure
SPARES_IDLE = 15 * 60.0  # for the next run to come before its spares are ended
