
-- The end of the function that makes the families which no call needs alone.
add_quorum_steps()
add_read_write_steps()
add_several_steps()
add_counter_steps(add_permit_steps())
add_entry_steps()
