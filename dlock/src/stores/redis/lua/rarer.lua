
-- The end of what is made only together with all others.
add_quorum_steps()
add_read_write_steps()
add_several_steps()
add_counter_steps(add_permit_steps())
add_entry_steps()
