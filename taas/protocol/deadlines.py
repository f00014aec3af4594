"""How long the processes of taas wait for each other, and how often they check, in seconds.

The table is in ascending order. Deadlines are nested: an agent's deadline is shorter than its
supervisor's, which is shorter than the user's patience. So an agent ends its ranks before its
supervisor considers the agent stuck, and a supervisor replies before the user considers the
supervisor stuck.
"""

# A thread that waits may use this much processor time: the clock's granularity, and a share of its
# time.
CLOCK_GRAIN = 0.02  # about the granularity in which processor time is counted
TURN = 0.02  # for the supervisor to send messages to agents; then it reads messages
IDLE_SHARE = 0.05  # of each second: a store, for example, polls
TICK = 0.05  # between two checks by an agent of its jobs: their output, and what is due
ASK_AGAIN = 0.1  # until an agent repeats its request to a rank's main thread
SPARES_APART = 0.1  # between two forks of spares, because the user continues to work
# after a run, before spares are forked: the next cell, or the end of taas, has precedence
SPARES_REST = 0.1
# of sleep in C code, after which another thread may pack variables: the main thread changes none
STILL = 0.2
# between two checks by a supervisor of its runs; the queue is checked every second
TICK_OF_RUNS = 0.25
HANG_LOOK_SHORTEST = 0.25  # between two looks at a run's progress, at least
SAME_END = 0.3  # for a rank in the cell after another one has failed: it may fail by itself
# for a spare to finish its current import and accept or reject a job; else a process is forked
TAKES_ORDER = 0.5
USAGE_FIRST = 0.5  # before the first look at ranks' usage: shorter runs show none
TERM_TO_KILL = 0.6  # from a rank's SIGTERM to its SIGKILL
BREAK_OFF = 1.0  # of sleep after an interrupt: the main thread is probably waiting for other ranks
FORKSERVER_DIES = 1.0  # after its pipe was closed
NAMES_NOW = 1.5  # for rank 0's variables if everything has to end now
FINISHING_LOOK = 1.5  # between two looks at an interrupted cell
BEAT = 1.5  # between two heartbeats on a connection between hosts
USAGE_LOOK = 2.0  # between two looks at the resources that ranks use
NOTICE = 2.0  # for a rank to report that it handles an interrupt
STACKS = 2.0  # for a rank to write its stacks
TREE_DIES = 2.0  # for killed processes to be dead
# If an agent notices a killed rank this soon after an error of another rank, the kill is blamed.
DEATH_IS_THE_CAUSE = 2.0
CHOOSE_GPUS = 2.0  # for another supervisor to choose among this machine's GPUs
LAST_WORD = 2.0  # for an engine to report why a connection is gone
LEAVE_KEPT = 3.0  # for the exit handlers of libraries in kept ranks
FAILURE = 3.5  # for the cell in a rank after another rank has failed
# for an agent to end ranks now, with rank 0's variables; an agent that still sends them is busy
END_RANKS = 4.0
SHOW_ALIVE = 5.0  # until an agent on another host shows its system again that it is not stopped
HANG_LOOK_OVERDUE = 5.0  # for a look at ranks; then another look replaces it
SILENCE = 6.0  # for a heartbeat from another host
END_AGENT = 8.0  # for an agent to end; then it is killed
NAMES_BEGIN = 10.0  # for rank 0 to begin packing its variables after a failure
FAILURE_OF_KEPT = 10.0  # for the cell in kept ranks after a failure, which ends their variables
SUPERVISOR_ANSWERS = 10.0  # for a supervisor's reply to a visitor
ENDED_OTHERS = 10.0  # in a collective that some ranks, which have ended the cell, will never join
HANG_LOOK_LONGEST = 10.0  # between two looks at a run's progress, at most
RANK_EXITS = 15.0  # for a rank to exit after its cell has ended
# for a supervisor to end and to release VMs on other hosts; then it is killed
END_SUPERVISOR = 15.0
# for a stopped agent on another host to continue; then its system kills it with its ranks
AGENT_STOPPED = 20.0
# to pack variables before a wait on GPUs is aborted: copies from a hung GPU never end
NAMES_AHEAD = 20.0
SPARES_LOOK = 20.0  # between two checks whether the machine has memory for spares
STORE_OPENS = 30.0  # for the store of a run on several machines to listen
CONNECT = 60.0  # for an agent on another host to reach its supervisor
IMPORTS_AHEAD = 60.0  # for a spare to import the modules that the last rank imported
FILE_ON_DEMAND = 60.0  # for the next part of a file that was not sent with the project
NAMES_PACKED = 60.0  # for rank 0 to pack its variables after a failure
SPARES_IDLE = 15 * 60.0  # until spares end if no run comes
