/* callbacks.h: functions that C calls and Python implements; read by build_source.py only. */
/* cffi:begin */
extern "Python" int kvs_py_hook(void *user, int point, uint64_t index);
extern "Python" uint32_t kvs_py_choose(void *user, uint32_t offered);
extern "Python" int kvs_py_phase_run(void *user, int step, uint32_t phase);
extern "Python" int kvs_py_phase_undo(void *user, int step, uint32_t phase);
/* cffi:end */
