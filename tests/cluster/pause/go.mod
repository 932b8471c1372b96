module homing.test/pause

go 1.25.0
